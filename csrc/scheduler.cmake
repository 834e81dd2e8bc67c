# SPDX-License-Identifier: Apache-2.0
# The control plane: a plain library, the `_scheduler` extension over it, and its unit tests.
option(MOORAGE_SANITIZE "build the C++ tests under ASan and UBSan" OFF)

add_library(moorage_scheduler STATIC
  core/config.cpp
  core/sha256.cpp
  pages/page_pool.cpp
  prefix/page_hash.cpp
  prefix/radix_tree.cpp
  requests/transitions.cpp
  schedule/admission.cpp
  schedule/commit.cpp
  schedule/intake.cpp
  schedule/integrity.cpp
  schedule/planning.cpp
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
