# SPDX-License-Identifier: Apache-2.0
# `_cpu_kernels`: one translation unit per instruction level, chosen at run time by cpuid.
set(CPU_DIR ${CMAKE_CURRENT_LIST_DIR})
nanobind_add_module(_cpu_kernels NB_STATIC NOSTRIP
  ${CPU_DIR}/module.cpp
  ${CPU_DIR}/level.cpp
  ${CPU_DIR}/thread_pool.cpp
  ${CPU_DIR}/weights.cpp
  ${CPU_DIR}/llama.cpp
  ${CPU_DIR}/llama_small.cpp
  ${CPU_DIR}/llama_large.cpp
  ${CPU_DIR}/paged_prefill.cpp
  ${CPU_DIR}/ops.cpp
  ${CPU_DIR}/portable.cpp
  ${CPU_DIR}/avx512_rows.cpp
  ${CPU_DIR}/avx512_linear.cpp
  ${CPU_DIR}/avx512_attention.cpp
  ${CPU_DIR}/amx_linear.cpp
  ${CPU_DIR}/amx_attention.cpp)
target_compile_options(_cpu_kernels PRIVATE -O3 -Wall -Wextra -fno-math-errno -fno-trapping-math)
set(AVX512_FLAGS -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq
    -mavx512vnni -mavx512bf16 -mprefer-vector-width=512
    # gcc 12's own AVX-512 headers read "undefined" registers on purpose
    -Wno-maybe-uninitialized -Wno-uninitialized)
set(AMX_FLAGS ${AVX512_FLAGS} -mamx-tile -mamx-bf16)
set_source_files_properties(
  ${CPU_DIR}/avx512_rows.cpp ${CPU_DIR}/avx512_linear.cpp ${CPU_DIR}/avx512_attention.cpp
  PROPERTIES COMPILE_OPTIONS "${AVX512_FLAGS}")
set_source_files_properties(${CPU_DIR}/amx_linear.cpp ${CPU_DIR}/amx_attention.cpp
  PROPERTIES COMPILE_OPTIONS "${AMX_FLAGS}")
if(MOORAGE_EMULATE_AMX)
  target_compile_definitions(_cpu_kernels PRIVATE MOORAGE_EMULATE_AMX)
endif()
install(TARGETS _cpu_kernels LIBRARY DESTINATION .)
