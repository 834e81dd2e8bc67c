// SPDX-License-Identifier: Apache-2.0
#include "level.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace moorage::cpu {
namespace {

constexpr int kArchReqXcompPerm = 0x1023;
constexpr int kXfeatureTileData = 18;

bool bit(unsigned value, int index) { return (value >> index) & 1U; }

unsigned long long xcr0() {
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

CpuLevel probe() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return CpuLevel::kPortable;
  const bool has_osxsave = bit(c, 27);
  const bool has_fma = bit(c, 12);
  const bool has_f16c = bit(c, 29);
  if (!has_osxsave || !has_fma || !has_f16c) return CpuLevel::kPortable;
  // The OS must save the opmask and both halves of the zmm registers.
  constexpr unsigned long long kZmmState = 0xE6;
  const unsigned long long state = xcr0();
  if ((state & kZmmState) != kZmmState) return CpuLevel::kPortable;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return CpuLevel::kPortable;
  const bool has_base = bit(b, 5) && bit(b, 8) && bit(b, 16) && bit(b, 17) && bit(b, 30) &&
                        bit(b, 31);  // AVX2, BMI2, AVX-512 F, DQ, BW, VL
  const bool has_vnni = bit(c, 11);
  const bool has_amx = bit(d, 22) && bit(d, 24);  // bf16, tile
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return CpuLevel::kPortable;
  const bool has_bf16 = bit(a, 5);
  if (!has_base || !has_vnni || !has_bf16) return CpuLevel::kPortable;
#ifdef MOORAGE_EMULATE_AMX
  return CpuLevel::kAmx;
#endif
  constexpr unsigned long long kTileState = 0x60000;
  if (!has_amx || (state & kTileState) != kTileState) return CpuLevel::kAvx512;
  const long refused = syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData);
  return refused == 0 ? CpuLevel::kAmx : CpuLevel::kAvx512;
}

}  // namespace

CpuLevel detect_level() {
  static const CpuLevel level = probe();
  return level;
}

std::string_view level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kPortable:
      return "portable";
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kAmx:
      return "amx";
  }
  return "portable";
}

CpuLevel level_of_name(const std::string& name) {
  for (CpuLevel level : {CpuLevel::kPortable, CpuLevel::kAvx512, CpuLevel::kAmx}) {
    if (name != level_name(level)) continue;
    if (level <= detect_level()) return level;
    throw std::invalid_argument("level: this CPU does not offer '" + name + "'");
  }
  throw std::invalid_argument("level: got '" + name + "'; allowed: portable, avx512, amx");
}

std::vector<std::string> available_levels() {
  std::vector<std::string> names;
  for (CpuLevel level : {CpuLevel::kPortable, CpuLevel::kAvx512, CpuLevel::kAmx}) {
    if (level <= detect_level()) names.emplace_back(level_name(level));
  }
  return names;
}

}  // namespace moorage::cpu
