# SPDX-License-Identifier: Apache-2.0
# The control plane: a plain library, the `_scheduler` extension over it, and its unit tests.
option(MOORAGE_SANITIZE "build the C++ tests under ASan and UBSan" OFF)
option(MOORAGE_BUILD_FUZZER "build the libFuzzer target scheduler_fuzz (needs clang)" OFF)

add_library(moorage_scheduler STATIC
  core/config.cpp
  core/sha256.cpp
  pages/page_pool.cpp
  prefix/page_hash.cpp
  prefix/radix_tree.cpp
  prefix/radix_tree_look.cpp
  prefix/radix_tree_shrink.cpp
  prefix/reuse.cpp
  requests/transitions.cpp
  schedule/admission.cpp
  schedule/commit.cpp
  schedule/elsewhere.cpp
  schedule/intake.cpp
  schedule/integrity.cpp
  schedule/leases.cpp
  schedule/loads.cpp
  schedule/moves.cpp
  schedule/planning.cpp
  schedule/probes.cpp
  schedule/retraction.cpp
  schedule/transfers.cpp
  schedule/wait_queue.cpp
  tiers/lower_tiers.cpp
  tiers/tickets.cpp
  tiers/write_through.cpp
)
target_include_directories(moorage_scheduler PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")
target_compile_options(moorage_scheduler PUBLIC -Wall -Wextra -Werror=return-type)

if(MOORAGE_BUILD_SCHEDULER)
  nanobind_add_module(_scheduler NB_STATIC
    bindings/bind_inputs.cpp
    bindings/bind_outputs.cpp
    bindings/bind_scheduler.cpp
  )
  target_link_libraries(_scheduler PRIVATE moorage_scheduler)
  install(TARGETS _scheduler LIBRARY DESTINATION .)
endif()

if(MOORAGE_BUILD_TESTS)
  enable_testing()
  # From source where it is there, so that the sanitizers see through it.
  if(EXISTS /usr/src/googletest/CMakeLists.txt)
    set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
    add_subdirectory(/usr/src/googletest googletest EXCLUDE_FROM_ALL)
  else()
    find_package(GTest REQUIRED)
  endif()
  if(MOORAGE_SANITIZE)
    set(sanitize -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1)
    target_compile_options(moorage_scheduler PUBLIC ${sanitize})
    target_link_options(moorage_scheduler PUBLIC ${sanitize})
  endif()

  set(test_dir "${CMAKE_CURRENT_SOURCE_DIR}/../tests/csrc")
  add_executable(scheduler_tests
    "${test_dir}/lower_tiers_test.cpp"
    "${test_dir}/page_pool_test.cpp"
    "${test_dir}/radix_tree_test.cpp"
    "${test_dir}/reuse_test.cpp"
    "${test_dir}/scheduler_test.cpp"
    "${test_dir}/sha256_test.cpp"
    "${test_dir}/transitions_test.cpp"
  )
  target_link_libraries(scheduler_tests PRIVATE moorage_scheduler GTest::gtest_main)
  include(GoogleTest)
  gtest_discover_tests(scheduler_tests DISCOVERY_TIMEOUT 60)

  foreach(case copy_owned_pages copy_node_ref undecided_transition)
    set(compile "${CMAKE_CXX_COMPILER}" -std=c++20 -fsyntax-only
        -I "${CMAKE_CURRENT_SOURCE_DIR}" "${test_dir}/compile_fail/${case}.cpp")
    add_test(NAME compile_fail.${case}.compiles_as_it_should COMMAND ${compile})
    add_test(NAME compile_fail.${case}.is_refused COMMAND ${compile} -DMOORAGE_COPY)
    set_tests_properties(compile_fail.${case}.is_refused PROPERTIES WILL_FAIL TRUE)
  endforeach()
endif()

if(MOORAGE_BUILD_FUZZER)
  target_compile_options(moorage_scheduler PUBLIC -fsanitize=fuzzer-no-link,address,undefined -g -O1)
  add_executable(scheduler_fuzz "${CMAKE_CURRENT_SOURCE_DIR}/../tests/csrc/scheduler_fuzz.cpp")
  target_link_libraries(scheduler_fuzz PRIVATE moorage_scheduler)
  target_link_options(scheduler_fuzz PRIVATE -fsanitize=fuzzer,address,undefined)
endif()
