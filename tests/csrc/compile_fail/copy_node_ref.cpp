// SPDX-License-Identifier: Apache-2.0
// Must not compile with MOORAGE_COPY; must compile without it, so that it fails for that reason.
#include "prefix/node.h"

moorage::NodeRef second_reference(const moorage::NodeRef& ref) {
#ifdef MOORAGE_COPY
  return ref;
#else
  return ref.share();
#endif
}
