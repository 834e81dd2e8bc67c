// SPDX-License-Identifier: Apache-2.0
// With MOORAGE_COPY a listed illegal pair gets an overload too: the compiler must object.
#include "requests/events.h"

namespace moorage {
#ifdef MOORAGE_COPY
Waiting on(Finish&&, Waiting&&);
#endif
}  // namespace moorage

#include "requests/transitions.h"
