// SPDX-License-Identifier: Apache-2.0
// Pages on their way between tiers: written through as they fill, loaded before an admission,
// moved by request of the owner. A request that waits for pages stays Waiting: tickets are not its.
#include <algorithm>

#include "schedule/scheduler.h"

namespace moorage {
// ---- up ----------------------------------------------------------------------------------------

const PageHash& Scheduler::page_hash(PageNames& names, TokenSpan tokens, std::int32_t index) const {
  while (static_cast<std::int32_t>(names.pages.size()) <= index) {
    const std::size_t start = names.pages.size() * static_cast<std::size_t>(config_.page_size);
    names.pages.push_back(hash_page(names.space,
                                    names.pages.empty() ? kRootHash : names.pages.back(),
                                    tokens.subspan(start, config_.page_size)));
  }
  return names.pages[static_cast<std::size_t>(index)];
}

// Names of the pages behind a match that lie in lower tiers, without a gap.
std::vector<PageHash> Scheduler::pages_below(PageNames& names, TokenSpan tokens,
                                             const PrefixMatch& match) const {
  const std::int32_t first = match.full_len / config_.page_size;
  const auto most = static_cast<std::int32_t>(tokens.size()) / config_.page_size;
  if (match.node != nullptr && static_cast<std::int32_t>(names.pages.size()) < first) {
    names.pages = tree_.hashes_of(*match.node);
    names.pages.resize(static_cast<std::size_t>(first));
  }
  std::vector<PageHash> found;
  for (std::int32_t i = first; i < most; ++i) {
    const PageHash& hash = page_hash(names, tokens, i);
    if (!tiers_.is_in_l2(hash) && !tiers_.is_in_l3(hash)) break;
    found.push_back(hash);
  }
  return found;
}

std::vector<PageHash> Scheduler::pages_below(Request& request, TokenSpan tokens,
                                             const PrefixMatch& match) const {
  if (request.names.pages.empty()) {
    request.names.space = hash_namespace(config_.model_fingerprint, request.salt);
  }
  return pages_below(request.names, tokens, match);
}

// Starts bringing pages behind `match` nearer. Returns the transfer to wait for, or -1.
std::int64_t Scheduler::start_transfer(const std::string& salt, TokenSpan tokens,
                                       PrefixMatch match, std::span<const PageHash> hashes) {
  tiers_.note_use(hashes);
  for (const PageHash& hash : hashes) tiers_.touch(hash);
  const auto first_lower = std::ranges::find_if(
      hashes, [this](const PageHash& hash) { return !tiers_.is_in_l2(hash); });
  if (first_lower != hashes.end()) {
    const std::int64_t id = start_fetch({first_lower, hashes.end()});
    if (id >= 0) return id;
  }
  return start_load(salt, tokens, std::move(match), {hashes.begin(), first_lower});
}

std::int64_t Scheduler::start_fetch(std::span<const PageHash> hashes) {
  Transfer transfer{ToL2{}, {}, -1, 0, {}};
  for (const PageHash& hash : hashes) {
    if (tiers_.is_in_l2(hash)) continue;
    if (tiers_.is_coming_to_l2(hash)) {  // by somebody else's ticket: wait for that
      if (transfer.num_outstanding > 0) break;
      const auto other = fetching_.find(hash);
      return other == fetching_.end() ? -1 : other->second;
    }
    if (!tiers_.is_in_l3(hash)) break;  // it was in L2 alone, and made room for those before it
    const std::int64_t ticket = tiers_.fetch(hash);
    if (ticket < 0) break;
    fetching_[hash] = next_transfer_;
    transfer.hashes.push_back(hash);
    transfer.num_outstanding += 1;
    transfer_of_ticket_[ticket] = {next_transfer_, 0};
  }
  if (transfer.num_outstanding == 0) return -1;
  transfers_.emplace(next_transfer_, std::move(transfer));
  return next_transfer_++;
}

std::int64_t Scheduler::start_load(const std::string& salt, TokenSpan tokens, PrefixMatch match,
                                   std::span<const PageHash> hashes) {
  if (hashes.empty()) return -1;
  const auto other = loading_.find(hashes[0]);
  if (other != loading_.end()) return other->second;
  const auto end = std::ranges::find_if(
      hashes, [this](const PageHash& hash) { return loading_.contains(hash); });
  auto num_pages = static_cast<std::int32_t>(end - hashes.begin());
  const std::int32_t from = match.full_len;
  NodeRef prefix = tree_.pin(salt, match);
  make_room(num_pages);
  num_pages = std::min(num_pages, pool_.num_free());
  if (num_pages == 0) return -1;
  const TokenSpan loaded = tokens.subspan(from, num_pages * config_.page_size);
  OwnedPages pages(pool_, PageOwner::kInFlight);
  Transfer transfer{ToL2{}, {}, -1, 0, {}};
  issue_loads(transfer, hashes.first(static_cast<std::size_t>(num_pages)), pages);
  transfer.target =
      ToTree{std::move(prefix), std::move(pages), {loaded.begin(), loaded.end()}};
  transfers_.emplace(next_transfer_, std::move(transfer));
  return next_transfer_++;
}

// The pages behind a match that lie in lower tiers and come sooner than they are computed.
std::vector<PageHash> Scheduler::worth_bringing(Request& request, const PrefixMatch& match) {
  if (!tiers_.is_enabled() || request.loads_left == 0) return {};
  const TokenSpan wanted = TokenSpan(request.tokens).first(request.len() - 1);
  std::vector<PageHash> hashes = pages_below(request, wanted, match);
  const std::size_t num_worth = num_worth_loading(hashes, match.full_len);
  stats_.num_declined_pages += static_cast<std::int64_t>(hashes.size() - num_worth);
  hashes.resize(num_worth);
  return hashes;
}

// A waiting request whose prefix goes on in a lower tier waits for it; true: it does.
bool Scheduler::waits_for_transfer(Request& request, const PrefixMatch& match,
                                   std::span<const PageHash> below) {
  if (below.empty()) return false;
  const TokenSpan wanted = TokenSpan(request.tokens).first(request.len() - 1);
  const std::int64_t newest = next_transfer_;
  const std::int64_t id = start_transfer(request.salt, wanted, match, below);
  if (id < 0) return false;
  request.waits_for = id;
  // A store that hangs costs no more time than computing would have.
  const std::int64_t compute_ns =
      prefill_ns(match.full_len, match.full_len + static_cast<std::int32_t>(below.size()) *
                                                      config_.page_size);
  request.fetch_until_ms = compute_ns == 0 ? 0 : now_ms_ + compute_ns / 1'000'000 + 1;
  if (id < newest) return true;  // somebody else's
  request.loads_left -= 1;
  const Transfer& transfer = transfers_.at(id);
  const std::int32_t num_tokens =
      static_cast<std::int32_t>(transfer.hashes.size()) * config_.page_size;
  if (!std::holds_alternative<ToL2>(transfer.target)) {
    request.loaded_from = match.full_len;
    request.num_loaded = num_tokens;
  } else {
    request.num_fetched = num_tokens;
  }
  return true;
}

bool Scheduler::is_waiting_for_transfer(Request& request) const {
  const auto found = transfers_.find(request.waits_for);
  const bool is_late = request.fetch_until_ms > 0 && now_ms_ >= request.fetch_until_ms;
  if (found != transfers_.end()) {
    if (!is_late) return true;
    request.loads_left = 0;  // what is still on its way it computes
  }
  request.waits_for = -1;
  return false;
}

// Which tokens of an admission's match were in which tier.
Admission Scheduler::make_admission(const Request& request, SlotId slot,
                                    const PrefixMatch& match) const {
  const std::int32_t loaded =
      std::clamp(match.full_len - request.loaded_from, 0, request.num_loaded);
  const std::int32_t fetched = std::min(loaded, request.num_fetched);
  return {request.id.value,  slot.value, request.len(), match.len() - loaded,
          loaded - fetched, fetched,    request.was_retracted, false};
}

// ---- acks --------------------------------------------------------------------------------------

void Scheduler::apply_ack(const TransferAckInput& ack, std::vector<EndedRequest>& ended) {
  tiers_.ack(ack.ticket, ack.ok);
  const auto found = transfer_of_ticket_.find(ack.ticket);
  if (found == transfer_of_ticket_.end()) return;  // written through: nobody waits
  const auto [id, index] = found->second;
  transfer_of_ticket_.erase(found);
  Transfer& transfer = transfers_.at(id);
  if (!std::holds_alternative<ToL2>(transfer.target)) {
    transfer.is_there[static_cast<std::size_t>(index)] = ack.ok ? 1 : 0;
  }
  if (--transfer.num_outstanding == 0) finish_transfer(id, ended);
}

// What came without a gap enters the tree; the rest is computed by whoever wants it.
void Scheduler::finish_transfer(std::int64_t id, std::vector<EndedRequest>& ended) {
  auto node = transfers_.extract(id);
  Transfer& transfer = node.mapped();
  const bool is_fetch = std::holds_alternative<ToL2>(transfer.target);
  for (const PageHash& hash : transfer.hashes) (is_fetch ? fetching_ : loading_).erase(hash);
  if (is_fetch) return;
  num_loads_ -= 1;
  const auto num_there = static_cast<std::int32_t>(
      std::ranges::find(transfer.is_there, 0) - transfer.is_there.begin());
  if (const auto* own = std::get_if<ToRequest>(&transfer.target)) {
    return finish_own_load(own->id, static_cast<std::int32_t>(transfer.is_there.size()), num_there,
                           ended);
  }
  if (num_there == 0) return;
  ToTree& to = std::get<ToTree>(transfer.target);
  adopted_.clear();
  const TokenSpan tokens =
      TokenSpan(to.tokens).first(static_cast<std::size_t>(num_there) * config_.page_size);
  tree_.publish(to.prefix, tokens, to.pages.split_front(num_there), adopted_);
  tree_.note_awaited(to.prefix);
  tiers_.tick(num_there);
}

}  // namespace moorage
