// SPDX-License-Identifier: Apache-2.0
// One overload per legal (event, state) pair, the table of the illegal ones, and the compiler's
// proof that the two cover everything. docs/scheduler.md draws the graph from fsm_table().
#pragma once

#include <array>
#include <concepts>
#include <optional>
#include <type_traits>
#include <vector>

#include "requests/events.h"

namespace moorage {

inline Draining drain(Holdings&& kv, EndStatus status, std::string message = {}) {
  kv.tail.hand_to(PageOwner::kInFlight);
  return Draining{std::move(kv), status, std::move(message)};
}

inline Retracting start_retracting(Holdings&& kv) {
  kv.tail.hand_to(PageOwner::kInFlight);
  return Retracting{std::move(kv)};
}

inline Prefilling on(Admit&& event, Waiting&&) { return Prefilling{std::move(event.kv)}; }
inline Ended on(Abort&&, Waiting&&) { return Ended{EndStatus::kAborted, {}}; }
inline Ended on(Fail&& event, Waiting&&) {
  return Ended{EndStatus::kFailed, std::move(event.message)};
}

inline Bootstrapping on(AdmitRemote&& event, Waiting&&) {
  return Bootstrapping{std::move(event.kv)};
}
inline Prefilling on(Bootstrapped&&, Bootstrapping&& from) {
  return Prefilling{std::move(from.kv)};
}
inline Draining on(Abort&&, Bootstrapping&& from) {
  return drain(std::move(from.kv), EndStatus::kAborted);
}
inline Draining on(Fail&& event, Bootstrapping&& from) {
  return drain(std::move(from.kv), EndStatus::kFailed, std::move(event.message));
}
inline Retracting on(Retract&&, Bootstrapping&& from) {
  return start_retracting(std::move(from.kv));
}

inline Loading on(AdmitLoading&& event, Waiting&&) { return Loading{std::move(event.kv)}; }
inline Prefilling on(Loaded&&, Loading&& from) { return Prefilling{std::move(from.kv)}; }
inline Draining on(Abort&&, Loading&& from) {
  return drain(std::move(from.kv), EndStatus::kAborted);
}
inline Draining on(Fail&& event, Loading&& from) {
  return drain(std::move(from.kv), EndStatus::kFailed, std::move(event.message));
}
inline Retracting on(Retract&&, Loading&& from) { return start_retracting(std::move(from.kv)); }

inline Decoding on(PrefillDone&&, Prefilling&& from) { return Decoding{std::move(from.kv)}; }
inline Draining on(Abort&&, Prefilling&& from) {
  return drain(std::move(from.kv), EndStatus::kAborted);
}
inline Draining on(Fail&& event, Prefilling&& from) {
  return drain(std::move(from.kv), EndStatus::kFailed, std::move(event.message));
}
inline Retracting on(Retract&&, Prefilling&& from) { return start_retracting(std::move(from.kv)); }

inline Draining on(Finish&&, Decoding&& from) {
  return drain(std::move(from.kv), EndStatus::kFinished);
}
inline Draining on(Abort&&, Decoding&& from) {
  return drain(std::move(from.kv), EndStatus::kAborted);
}
inline Draining on(Fail&& event, Decoding&& from) {
  return drain(std::move(from.kv), EndStatus::kFailed, std::move(event.message));
}
inline Retracting on(Retract&&, Decoding&& from) { return start_retracting(std::move(from.kv)); }

inline Sending on(HandOver&&, Decoding&& from) { return Sending{std::move(from.kv)}; }
inline Draining on(Sent&&, Sending&& from) {
  return drain(std::move(from.kv), EndStatus::kFinished);
}
inline Draining on(Abort&&, Sending&& from) {
  return drain(std::move(from.kv), EndStatus::kAborted);
}
inline Draining on(Fail&& event, Sending&& from) {
  return drain(std::move(from.kv), EndStatus::kFailed, std::move(event.message));
}

// A step in flight may still end a request that is being retracted.
inline Waiting on(Drained&&, Retracting&&) { return Waiting{}; }
inline Sending on(HandOver&&, Retracting&& from) {
  from.kv.tail.hand_to(PageOwner::kRequest);
  return Sending{std::move(from.kv)};
}
inline Draining on(Finish&&, Retracting&& from) {
  return Draining{std::move(from.kv), EndStatus::kFinished, {}};
}
inline Draining on(Abort&&, Retracting&& from) {
  return Draining{std::move(from.kv), EndStatus::kAborted, {}};
}
inline Draining on(Fail&& event, Retracting&& from) {
  return Draining{std::move(from.kv), EndStatus::kFailed, std::move(event.message)};
}

// The first reason to end stands: an abort that comes late changes nothing.
inline Draining on(Abort&&, Draining&& from) { return std::move(from); }
inline Ended on(Drained&&, Draining&& from) {
  return Ended{from.status, std::move(from.message)};
}

struct IllegalPair {
  StateKind state;
  EventKind event;
};

inline constexpr std::array kIllegalPairs = {
    IllegalPair{StateKind::kWaiting, EventKind::kBootstrapped},
    IllegalPair{StateKind::kWaiting, EventKind::kPrefillDone},
    IllegalPair{StateKind::kWaiting, EventKind::kFinish},
    IllegalPair{StateKind::kWaiting, EventKind::kHandOver},
    IllegalPair{StateKind::kWaiting, EventKind::kSent},
    IllegalPair{StateKind::kWaiting, EventKind::kRetract},
    IllegalPair{StateKind::kWaiting, EventKind::kDrained},
    IllegalPair{StateKind::kWaiting, EventKind::kLoaded},
    IllegalPair{StateKind::kBootstrapping, EventKind::kAdmit},
    IllegalPair{StateKind::kBootstrapping, EventKind::kAdmitRemote},
    IllegalPair{StateKind::kBootstrapping, EventKind::kPrefillDone},
    IllegalPair{StateKind::kBootstrapping, EventKind::kFinish},
    IllegalPair{StateKind::kBootstrapping, EventKind::kHandOver},
    IllegalPair{StateKind::kBootstrapping, EventKind::kSent},
    IllegalPair{StateKind::kBootstrapping, EventKind::kDrained},
    IllegalPair{StateKind::kBootstrapping, EventKind::kAdmitLoading},
    IllegalPair{StateKind::kBootstrapping, EventKind::kLoaded},
    IllegalPair{StateKind::kLoading, EventKind::kAdmit},
    IllegalPair{StateKind::kLoading, EventKind::kAdmitRemote},
    IllegalPair{StateKind::kLoading, EventKind::kBootstrapped},
    IllegalPair{StateKind::kLoading, EventKind::kAdmitLoading},
    IllegalPair{StateKind::kLoading, EventKind::kPrefillDone},
    IllegalPair{StateKind::kLoading, EventKind::kFinish},
    IllegalPair{StateKind::kLoading, EventKind::kHandOver},
    IllegalPair{StateKind::kLoading, EventKind::kSent},
    IllegalPair{StateKind::kLoading, EventKind::kDrained},
    IllegalPair{StateKind::kPrefilling, EventKind::kAdmit},
    IllegalPair{StateKind::kPrefilling, EventKind::kAdmitRemote},
    IllegalPair{StateKind::kPrefilling, EventKind::kBootstrapped},
    IllegalPair{StateKind::kPrefilling, EventKind::kFinish},
    IllegalPair{StateKind::kPrefilling, EventKind::kHandOver},
    IllegalPair{StateKind::kPrefilling, EventKind::kSent},
    IllegalPair{StateKind::kPrefilling, EventKind::kDrained},
    IllegalPair{StateKind::kPrefilling, EventKind::kAdmitLoading},
    IllegalPair{StateKind::kPrefilling, EventKind::kLoaded},
    IllegalPair{StateKind::kDecoding, EventKind::kAdmit},
    IllegalPair{StateKind::kDecoding, EventKind::kAdmitRemote},
    IllegalPair{StateKind::kDecoding, EventKind::kBootstrapped},
    IllegalPair{StateKind::kDecoding, EventKind::kPrefillDone},
    IllegalPair{StateKind::kDecoding, EventKind::kSent},
    IllegalPair{StateKind::kDecoding, EventKind::kDrained},
    IllegalPair{StateKind::kDecoding, EventKind::kAdmitLoading},
    IllegalPair{StateKind::kDecoding, EventKind::kLoaded},
    IllegalPair{StateKind::kSending, EventKind::kAdmit},
    IllegalPair{StateKind::kSending, EventKind::kAdmitRemote},
    IllegalPair{StateKind::kSending, EventKind::kBootstrapped},
    IllegalPair{StateKind::kSending, EventKind::kPrefillDone},
    IllegalPair{StateKind::kSending, EventKind::kFinish},
    IllegalPair{StateKind::kSending, EventKind::kHandOver},
    IllegalPair{StateKind::kSending, EventKind::kRetract},
    IllegalPair{StateKind::kSending, EventKind::kDrained},
    IllegalPair{StateKind::kSending, EventKind::kAdmitLoading},
    IllegalPair{StateKind::kSending, EventKind::kLoaded},
    IllegalPair{StateKind::kRetracting, EventKind::kAdmit},
    IllegalPair{StateKind::kRetracting, EventKind::kAdmitRemote},
    IllegalPair{StateKind::kRetracting, EventKind::kBootstrapped},
    IllegalPair{StateKind::kRetracting, EventKind::kPrefillDone},
    IllegalPair{StateKind::kRetracting, EventKind::kSent},
    IllegalPair{StateKind::kRetracting, EventKind::kRetract},
    IllegalPair{StateKind::kRetracting, EventKind::kAdmitLoading},
    IllegalPair{StateKind::kRetracting, EventKind::kLoaded},
    IllegalPair{StateKind::kDraining, EventKind::kAdmit},
    IllegalPair{StateKind::kDraining, EventKind::kAdmitRemote},
    IllegalPair{StateKind::kDraining, EventKind::kBootstrapped},
    IllegalPair{StateKind::kDraining, EventKind::kPrefillDone},
    IllegalPair{StateKind::kDraining, EventKind::kFinish},
    IllegalPair{StateKind::kDraining, EventKind::kHandOver},
    IllegalPair{StateKind::kDraining, EventKind::kSent},
    IllegalPair{StateKind::kDraining, EventKind::kFail},
    IllegalPair{StateKind::kDraining, EventKind::kRetract},
    IllegalPair{StateKind::kDraining, EventKind::kAdmitLoading},
    IllegalPair{StateKind::kDraining, EventKind::kLoaded},
    IllegalPair{StateKind::kEnded, EventKind::kAdmit},
    IllegalPair{StateKind::kEnded, EventKind::kAdmitRemote},
    IllegalPair{StateKind::kEnded, EventKind::kBootstrapped},
    IllegalPair{StateKind::kEnded, EventKind::kPrefillDone},
    IllegalPair{StateKind::kEnded, EventKind::kFinish},
    IllegalPair{StateKind::kEnded, EventKind::kHandOver},
    IllegalPair{StateKind::kEnded, EventKind::kSent},
    IllegalPair{StateKind::kEnded, EventKind::kAbort},
    IllegalPair{StateKind::kEnded, EventKind::kFail},
    IllegalPair{StateKind::kEnded, EventKind::kRetract},
    IllegalPair{StateKind::kEnded, EventKind::kDrained},
    IllegalPair{StateKind::kEnded, EventKind::kAdmitLoading},
    IllegalPair{StateKind::kEnded, EventKind::kLoaded},
};

template <class... Ts>
struct TypeList {};
using Events =
    TypeList<Admit, AdmitRemote, Bootstrapped, AdmitLoading, Loaded, PrefillDone, Finish, HandOver,
             Sent, Abort, Fail, Retract, Drained>;

template <class E, class S>
concept Transition = requires(E event, S state) { on(std::move(event), std::move(state)); };

constexpr int times_listed_illegal(StateKind state, EventKind event) {
  int times = 0;
  for (const IllegalPair& pair : kIllegalPairs) {
    times += pair.state == state && pair.event == event ? 1 : 0;
  }
  return times;
}

// Legal and unlisted, or illegal and listed once; anything else is a hole or an overlap.
template <class E, class S>
constexpr bool is_decided() {
  return times_listed_illegal(S::kKind, E::kKind) == (Transition<E, S> ? 0 : 1);
}

template <class E, class... States>
constexpr bool is_decided_in_all(std::type_identity<std::variant<States...>>) {
  return (is_decided<E, States>() && ...);
}

template <class... Es>
constexpr bool every_pair_is_decided(TypeList<Es...>) {
  return (is_decided_in_all<Es>(std::type_identity<State>{}) && ...);
}

static_assert(every_pair_is_decided(Events{}),
              "each (state, event) pair needs an on() overload or an entry in kIllegalPairs, "
              "and not both");

struct IllegalEvent {
  std::string_view state;
  std::string_view event;
};

// Moves `state` on; an illegal event leaves it as it was and says so.
template <class E>
std::optional<IllegalEvent> apply(State& state, E event) {
  return std::visit(
      [&](auto& from) -> std::optional<IllegalEvent> {
        using S = std::decay_t<decltype(from)>;
        if constexpr (Transition<E, S>) {
          auto next = on(std::move(event), std::move(from));
          state = std::move(next);  // `from` is dead here
          return std::nullopt;
        } else {
          return IllegalEvent{S::kName, E::kName};
        }
      },
      state);
}

struct FsmRow {
  std::string_view state;
  std::string_view event;
  std::string_view next;  // empty: illegal
};

std::vector<FsmRow> fsm_table();

}  // namespace moorage
