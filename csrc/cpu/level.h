// SPDX-License-Identifier: Apache-2.0
// Which instruction levels this CPU offers. Does not know: kernels, who chooses one.
//
// Thread rule: everything from any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moorage::cpu {

enum class CpuLevel { kPortable = 0, kAvx512 = 1, kAmx = 2 };

// Returns the best level that the CPU and the kernel offer. AMX needs a permission for its tile
// state, which the first call asks for; a refused permission means kAvx512.
CpuLevel detect_level();

std::string_view level_name(CpuLevel level);
// Throws std::invalid_argument where the name is unknown or this CPU does not offer the level.
CpuLevel level_of_name(const std::string& name);
std::vector<std::string> available_levels();

}  // namespace moorage::cpu
