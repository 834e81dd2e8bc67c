// SPDX-License-Identifier: Apache-2.0
#include "llama.h"
namespace moorage::cpu {
bool amx_fits(const LlamaConfig&) { return false; }
void run_large(const LlamaWeights& weights, const LlamaStep& step, const TokenPlace* places,
               const int32_t* input_ids, int count, ThreadPool& pool, float* residual) {
  run_small(weights, step, places, input_ids, count, pool, residual);
}
}  // namespace moorage::cpu
