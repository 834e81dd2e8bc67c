// SPDX-License-Identifier: Apache-2.0
// The states of a request. Each owns exactly what is legal in it, so leaving a state gives back
// what the next one may not hold.
#pragma once

#include <string>
#include <string_view>
#include <variant>

#include "pages/owned_pages.h"
#include "prefix/node.h"
#include "schedule/slots.h"

namespace moorage {

// KV of a request that runs. Who owns which tokens:
//   [0, prefix.node().end())   the radix tree; kept by the reference, all pages full
//   [prefix.node().end(), ...) `tail`: private pages, the last ones perhaps not yet written
struct Holdings {
  OwnedSlot slot;
  NodeRef prefix;
  OwnedPages tail;

  std::int32_t base_len() const { return prefix.node().end(); }
};

enum class EndStatus : std::uint8_t { kFinished, kAborted, kFailed };

enum class StateKind : std::uint8_t {
  kWaiting,
  kBootstrapping,
  kLoading,
  kPrefilling,
  kDecoding,
  kSending,
  kRetracting,
  kDraining,
  kEnded,
};

struct Waiting {  // queued, new or retracted; holds no memory
  static constexpr StateKind kKind = StateKind::kWaiting;
  static constexpr std::string_view kName = "Waiting";
};

struct Bootstrapping {  // another engine computes the prompt and writes its KV into these pages
  static constexpr StateKind kKind = StateKind::kBootstrapping;
  static constexpr std::string_view kName = "Bootstrapping";
  Holdings kv;
};

struct Loading {  // runs behind pages of its tail that still come from L2: nothing it computes counts yet
  static constexpr StateKind kKind = StateKind::kLoading;
  static constexpr std::string_view kName = "Loading";
  Holdings kv;
};

struct Prefilling {  // tokens whose KV is still to be computed are known
  static constexpr StateKind kKind = StateKind::kPrefilling;
  static constexpr std::string_view kName = "Prefilling";
  Holdings kv;
};

struct Decoding {  // every known token but the last has its KV
  static constexpr StateKind kKind = StateKind::kDecoding;
  static constexpr std::string_view kName = "Decoding";
  Holdings kv;
};

struct Sending {  // finished; its KV stays until another engine has read it
  static constexpr StateKind kKind = StateKind::kSending;
  static constexpr std::string_view kName = "Sending";
  Holdings kv;
};

struct Retracting {  // gives its memory back once the steps in flight are over, then waits
  static constexpr StateKind kKind = StateKind::kRetracting;
  static constexpr std::string_view kName = "Retracting";
  Holdings kv;
};

struct Draining {  // over; its memory stays until the steps in flight are over
  static constexpr StateKind kKind = StateKind::kDraining;
  static constexpr std::string_view kName = "Draining";
  Holdings kv;
  EndStatus status;
  std::string message;
};

struct Ended {
  static constexpr StateKind kKind = StateKind::kEnded;
  static constexpr std::string_view kName = "Ended";
  EndStatus status;
  std::string message;
};

using State = std::variant<Waiting, Bootstrapping, Loading, Prefilling, Decoding, Sending,
                           Retracting, Draining, Ended>;

}  // namespace moorage
