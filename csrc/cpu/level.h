// SPDX-License-Identifier: Apache-2.0
// Which instruction level this process runs at. Does not know: kernels.
//
// Thread rule: detect() and current_level() from any thread; set_level() while no step runs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moorage::cpu {

enum class CpuLevel { kPortable = 0, kAvx512 = 1, kAmx = 2 };

// Returns the best level that the CPU and the kernel offer. AMX needs a permission for its tile
// state, which the first call asks for; a refused permission means kAvx512.
CpuLevel detect_level();

CpuLevel current_level();

// Requires: level <= detect_level(); throws std::invalid_argument otherwise.
void set_level(CpuLevel level);

std::string_view level_name(CpuLevel level);
CpuLevel level_of_name(const std::string& name);
std::vector<std::string> available_levels();

}  // namespace moorage::cpu
