// SPDX-License-Identifier: Apache-2.0
// Must not compile with MOORAGE_COPY; must compile without it, so that it fails for that reason.
#include "pages/owned_pages.h"

moorage::OwnedPages take_over(moorage::OwnedPages& pages) {
#ifdef MOORAGE_COPY
  return pages;
#else
  return std::move(pages);
#endif
}
