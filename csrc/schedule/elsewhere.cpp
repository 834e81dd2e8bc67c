// SPDX-License-Identifier: Apache-2.0
// Prefill and decode on two engines: pages another engine writes to before a request runs here, and
// pages it reads after a request has finished here.
#include "schedule/scheduler.h"

namespace moorage {

// ---- receiving ---------------------------------------------------------------------------------

// Takes the pages of the whole prompt for another engine to write to, all but the last token, whose
// logits are wanted here. False: there is nothing to write, or no room; it prefills like any other.
bool Scheduler::bootstrap(Request& request, Plan& plan) {
  const std::int32_t end = request.prefill_end - 1;
  request.remote_prefill = false;
  if (request.num_computed >= end || grow_tail(request, end, plan) < end) return false;
  request.num_planned = end;
  request.num_steps_in_flight += 1;
  request.awaits_remote = true;
  return true;
}

void Scheduler::apply_remote_prefill(const RemotePrefillInput& input,
                                     std::vector<EndedRequest>& ended) {
  Request& request = *find_request(input.request_id);
  request.awaits_remote = false;
  request.num_steps_in_flight -= 1;
  if (request.is<Bootstrapping>()) {
    if (input.ok) {
      request.num_computed = request.num_planned;
      publish_full_pages(request);
    } else {
      request.num_planned = request.num_computed;
    }
    fire(request, Bootstrapped{});
  }
  settle(request, ended);
}

// ---- sending -----------------------------------------------------------------------------------

// Over, as far as this engine goes: what another one waits for stays until it has it.
void Scheduler::finish(Request& request) {
  if (!request.send_kv) return fire(request, Finish{});
  fire(request, HandOver{});
  if (!request.is<Sending>()) return;
  request.awaits_send = true;
  request.num_steps_in_flight += 1;
  num_sending_ += 1;
  const Holdings& kv = *request.holdings();
  Send send{request.id.value, kv.slot.id().value, request.num_computed, {}, {}};
  send.pages = tree_.pages_of(kv.prefix.node());
  send.page_hashes = tree_.hashes_of(kv.prefix.node());
  const std::int32_t num_pages = config_.pages_of(request.num_computed);
  for (std::int32_t i = 0; static_cast<std::int32_t>(send.pages.size()) < num_pages; ++i) {
    send.pages.push_back(kv.tail[i]);
  }
  sends_.push_back(std::move(send));
}

void Scheduler::apply_send_done(const SendDoneInput& input, std::vector<EndedRequest>& ended) {
  Request& request = *find_request(input.request_id);
  request.awaits_send = false;
  request.num_steps_in_flight -= 1;
  num_sending_ -= 1;
  if (request.is<Sending>()) {
    if (input.ok) {
      fire(request, Sent{});
    } else {
      fire(request, Fail{"the other engine did not take the KV"});
    }
  }
  settle(request, ended);
}

}  // namespace moorage
