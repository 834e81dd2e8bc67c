// SPDX-License-Identifier: Apache-2.0
// What can happen to a request. Plain values; an event carries what its target state will own.
#pragma once

#include <string>
#include <string_view>

#include "requests/states.h"

namespace moorage {

enum class EventKind : std::uint8_t {
  kAdmit,
  kAdmitRemote,
  kBootstrapped,
  kAdmitLoading,
  kLoaded,
  kPrefillDone,
  kFinish,
  kHandOver,
  kSent,
  kAbort,
  kFail,
  kRetract,
  kDrained,
};

struct Admit {
  static constexpr EventKind kKind = EventKind::kAdmit;
  static constexpr std::string_view kName = "Admit";
  Holdings kv;
};

struct AdmitRemote {
  static constexpr EventKind kKind = EventKind::kAdmitRemote;
  static constexpr std::string_view kName = "AdmitRemote";
  Holdings kv;
};

struct Bootstrapped {  // the remote prefill is over: its KV is there, or will never be
  static constexpr EventKind kKind = EventKind::kBootstrapped;
  static constexpr std::string_view kName = "Bootstrapped";
};

struct AdmitLoading {  // some of its tail is being loaded
  static constexpr EventKind kKind = EventKind::kAdmitLoading;
  static constexpr std::string_view kName = "AdmitLoading";
  Holdings kv;
};

struct Loaded {  // those pages are there, as far as they were good
  static constexpr EventKind kKind = EventKind::kLoaded;
  static constexpr std::string_view kName = "Loaded";
};

struct PrefillDone {
  static constexpr EventKind kKind = EventKind::kPrefillDone;
  static constexpr std::string_view kName = "PrefillDone";
};

struct Finish {
  static constexpr EventKind kKind = EventKind::kFinish;
  static constexpr std::string_view kName = "Finish";
};

struct HandOver {  // finished here; another engine goes on, once it has the KV
  static constexpr EventKind kKind = EventKind::kHandOver;
  static constexpr std::string_view kName = "HandOver";
};

struct Sent {  // the other engine has it
  static constexpr EventKind kKind = EventKind::kSent;
  static constexpr std::string_view kName = "Sent";
};

struct Abort {
  static constexpr EventKind kKind = EventKind::kAbort;
  static constexpr std::string_view kName = "Abort";
};

struct Fail {
  static constexpr EventKind kKind = EventKind::kFail;
  static constexpr std::string_view kName = "Fail";
  std::string message;
};

struct Retract {
  static constexpr EventKind kKind = EventKind::kRetract;
  static constexpr std::string_view kName = "Retract";
};

struct Drained {  // no planned step touches the request's memory any more
  static constexpr EventKind kKind = EventKind::kDrained;
  static constexpr std::string_view kName = "Drained";
};

}  // namespace moorage
