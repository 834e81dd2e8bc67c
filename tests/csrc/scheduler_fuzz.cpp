// SPDX-License-Identifier: Apache-2.0
// libFuzzer target over sequences of calls: broken accounting, a leak or no progress is a crash.
#include "scheduler_driver.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moorage::SchedulerDriver({data, size}).run();
  return 0;
}
