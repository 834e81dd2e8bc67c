// SPDX-License-Identifier: Apache-2.0
// MOORAGE_CHECK: broken page accounting must stop the process (the supervisor restarts it), since
// going on would serve one request's KV to another. Never used for input from outside.
#pragma once

#include <cstdio>
#include <cstdlib>

#define MOORAGE_CHECK(condition, what)                                                      \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "%s:%d: broken invariant: %s (%s)\n", __FILE__, __LINE__, what, \
                   #condition);                                                             \
      std::abort();                                                                         \
    }                                                                                       \
  } while (false)
