// SPDX-License-Identifier: Apache-2.0
#include "requests/transitions.h"

namespace moorage {
namespace {

template <class E, class S>
FsmRow row() {
  if constexpr (Transition<E, S>) {
    using Next = decltype(on(std::declval<E>(), std::declval<S>()));
    return {S::kName, E::kName, Next::kName};
  } else {
    return {S::kName, E::kName, {}};
  }
}

template <class S, class... Es>
void add_rows(std::vector<FsmRow>& table, TypeList<Es...>) {
  (table.push_back(row<Es, S>()), ...);
}

template <class... States>
std::vector<FsmRow> table_of(std::type_identity<std::variant<States...>>) {
  std::vector<FsmRow> table;
  (add_rows<States>(table, Events{}), ...);
  return table;
}

}  // namespace

std::vector<FsmRow> fsm_table() { return table_of(std::type_identity<State>{}); }

}  // namespace moorage
