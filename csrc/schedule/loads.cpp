// SPDX-License-Identifier: Apache-2.0
// Pages from L2 for a request that runs already: they go into its own tail, and its rows, and no
// others, read them. Whoever runs the steps is told which tickets a row waits for; what it computed
// counts once they are acked, and counts for nothing if one of them was lost.
#include <algorithm>
#include <stdexcept>

#include "schedule/scheduler.h"

namespace moorage {

// One at a time: the steps of all wait for it, and a second one would come after the first. The
// pages of another engine's prefill are not for anybody else to write to.
bool Scheduler::may_run_while_loading(const Request& request,
                                      std::span<const PageHash> below) const {
  return config_.overlap_loads && num_own_loads_ == 0 && !below.empty() &&
         !request.remote_prefill && std::ranges::all_of(below, [this](const PageHash& hash) {
           return tiers_.is_in_l2(hash) && !loading_.contains(hash);
         });
}

// Tickets for a run of pages, one after the other, into new pages at the end of `pages`.
// Requires: there is room. Returns the transfer's number, which is the next one's.
std::int64_t Scheduler::issue_loads(Transfer& transfer, std::span<const PageHash> hashes,
                                    OwnedPages& pages) {
  for (const PageHash& hash : hashes) {
    const auto index = static_cast<std::int32_t>(transfer.hashes.size());
    transfer.hashes.push_back(hash);
    loading_[hash] = next_transfer_;
    const std::int64_t ticket = tiers_.load_back(hash, pages.grow());
    if (index == 0) transfer.first_ticket = ticket;
    MOORAGE_CHECK(ticket == transfer.first_ticket + index, "tickets of a load have a gap");
    transfer_of_ticket_[ticket] = {next_transfer_, index};
  }
  transfer.is_there.assign(hashes.size(), 0);
  transfer.num_outstanding = static_cast<std::int32_t>(hashes.size());
  num_loads_ += 1;
  stats_.num_loaded_pages += transfer.num_outstanding;
  return next_transfer_;
}

// Starts to load what there is room for; returns how many pages that are.
std::int32_t Scheduler::start_own_load(Request& request, std::span<const PageHash> hashes,
                                       OwnedPages& tail) {
  if (hashes.empty()) return 0;
  tiers_.note_use(hashes);
  for (const PageHash& hash : hashes) tiers_.touch(hash);
  make_room(static_cast<std::int32_t>(hashes.size()));
  const std::int32_t num_pages =
      std::min(static_cast<std::int32_t>(hashes.size()), pool_.num_free());
  if (num_pages == 0) return 0;
  Transfer transfer{ToRequest{request.id}, {}, -1, 0, {}};
  request.load =
      issue_loads(transfer, hashes.first(static_cast<std::size_t>(num_pages)), tail);
  transfers_.emplace(next_transfer_++, std::move(transfer));
  num_own_loads_ += 1;
  request.num_steps_in_flight += 1;
  request.loads_left -= 1;
  return num_pages;
}

// All tickets are acked. What came without a gap is the request's own KV now. If that is not all,
// the rows that read the rest ran for nothing, and it goes on from the first page that is bad.
void Scheduler::finish_own_load(RequestId id, std::int32_t num_pages, std::int32_t num_there,
                                std::vector<EndedRequest>& ended) {
  Request& request = *find_request(id);
  const std::int64_t load = std::exchange(request.load, -1);
  request.num_steps_in_flight -= 1;
  num_own_loads_ -= 1;
  const std::int32_t num_tokens = num_there * config_.page_size;
  // The last of them may have been brought from L3 first.
  const std::int32_t from_l2 =
      std::min(num_tokens, std::max(0, num_pages * config_.page_size - request.num_fetched));
  stats_.num_cached_tokens += num_tokens;
  stats_.num_l2_cached_tokens += from_l2;
  stats_.num_l3_cached_tokens += num_tokens - from_l2;
  request.num_computed += num_tokens;
  request.num_trusted = request.num_computed;
  if (num_there < num_pages) {
    for (std::int32_t i = 0; i < num_steps_in_flight_; ++i) {
      for (StepRow& row : steps_[(first_step_ + i) % kMaxStepsInFlight].rows) {
        row.is_void = row.is_void || row.load == load;
      }
    }
    request.num_planned = request.num_computed;
    request.has_drafts_in_flight = false;
    // Its tenant pays for what it computes after all, as if it had waited for the pages first.
    const std::int32_t num_lost = (num_pages - num_there) * config_.page_size;
    if (is_running(request) && !request.was_retracted) WaitQueue::charge(request, num_lost);
  }
  if (request.is<Loading>()) fire(request, Loaded{});
  publish_full_pages(request);
  settle(request, ended);
}

// ---- results wait for the loads their rows read ------------------------------------------------

void Scheduler::note_heard(const TransferAckInput& ack, HeardOf& heard) const {
  const auto found = transfer_of_ticket_.find(ack.ticket);
  if (found == transfer_of_ticket_.end()) return;
  Heard& of = heard[found->second.first];
  of.num_acks += 1;
  of.has_lost = of.has_lost || !ack.ok;
}

void Scheduler::validate_loads(const std::string& field, const Step& step,
                               const HeardOf& heard) const {
  for (const StepRow& row : step.rows) {
    const auto load = transfers_.find(row.load);
    if (load == transfers_.end()) continue;
    const auto of = heard.find(row.load);
    if (of != heard.end() && of->second.num_acks == load->second.num_outstanding) continue;
    const std::int64_t first = load->second.first_ticket;
    const auto end = first + static_cast<std::int64_t>(load->second.hashes.size());
    throw std::invalid_argument(field + ": " + std::to_string(step.id.value) +
                                " read pages of tickets " + std::to_string(first) + " to " +
                                std::to_string(end - 1) + ", which are not all acked");
  }
}

std::array<std::int64_t, 2> Scheduler::tickets_of_load(const StepRow& row) const {
  const auto load = transfers_.find(row.load);
  if (load == transfers_.end()) return {-1, -1};
  const std::int64_t first = load->second.first_ticket;
  return {first, first + static_cast<std::int64_t>(load->second.hashes.size())};
}

}  // namespace moorage
