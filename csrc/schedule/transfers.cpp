// SPDX-License-Identifier: Apache-2.0
// Pages on their way between tiers: written through as they fill, loaded before an admission,
// moved by request of the owner. A request that waits for pages stays Waiting: tickets are not its.
#include <algorithm>
#include <stdexcept>

#include "schedule/scheduler.h"

namespace moorage {
namespace {

[[noreturn]] void reject(const std::string& field, const std::string& why) {
  throw std::invalid_argument(field + ": " + why);
}

}  // namespace

// ---- down --------------------------------------------------------------------------------------

// Sends the full pages of a path, from a token on, to L2. Returns whether all are or will be there.
bool Scheduler::write_through(const Node& end, std::int32_t from_tokens) {
  bool is_whole = true;
  std::vector<const Node*> path;
  for (const Node* at = &end; !at->is_root() && at->end() > from_tokens; at = at->parent) {
    path.push_back(at);
  }
  std::ranges::reverse(path);  // parents first
  for (const Node* node : path) {
    const std::int32_t skipped = std::max(0, from_tokens - node->start) / config_.page_size;
    for (auto i = static_cast<std::size_t>(skipped); i < node->hashes.size(); ++i) {
      const Node* parent = node->parent;
      const PageHash& before =
          i > 0 ? node->hashes[i - 1] : parent->is_root() ? kRootHash : parent->hashes.back();
      const PageId page = node->pages[static_cast<std::int32_t>(i)];
      is_whole &= tiers_.write_back(pool_, page, node->hashes[i], before);
    }
  }
  return is_whole;
}

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

// Starts bringing pages behind `match` nearer. Returns the transfer to wait for, or -1.
std::int64_t Scheduler::start_transfer(const std::string& salt, TokenSpan tokens,
                                       PrefixMatch match, std::span<const PageHash> hashes) {
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
  Transfer transfer;
  for (const PageHash& hash : hashes) {
    if (tiers_.is_in_l2(hash)) continue;
    if (tiers_.is_coming_to_l2(hash)) {  // by somebody else's ticket: wait for that
      if (transfer.num_outstanding > 0) break;
      const auto other = fetching_.find(hash);
      return other == fetching_.end() ? -1 : other->second;
    }
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
  Transfer transfer;
  transfer.prefix.emplace(tree_.pin(salt, match));
  make_room(num_pages);
  num_pages = std::min(num_pages, pool_.num_free());
  if (num_pages == 0) return -1;
  transfer.pages.emplace(pool_, PageOwner::kInFlight);
  const TokenSpan loaded = tokens.subspan(from, num_pages * config_.page_size);
  transfer.tokens.assign(loaded.begin(), loaded.end());
  transfer.is_there.assign(static_cast<std::size_t>(num_pages), 0);
  transfer.num_outstanding = num_pages;
  for (std::int32_t i = 0; i < num_pages; ++i) {
    const PageHash& hash = hashes[static_cast<std::size_t>(i)];
    transfer.hashes.push_back(hash);
    loading_[hash] = next_transfer_;
    const std::int64_t ticket = tiers_.load_back(hash, transfer.pages->grow());
    transfer_of_ticket_[ticket] = {next_transfer_, i};
  }
  num_loads_ += 1;
  stats_.num_loaded_pages += num_pages;
  transfers_.emplace(next_transfer_, std::move(transfer));
  return next_transfer_++;
}

// A waiting request whose prefix goes on in a lower tier waits for it; true: it does.
bool Scheduler::waits_for_transfer(Request& request, const PrefixMatch& match) {
  if (!tiers_.is_enabled() || request.loads_left == 0) return false;
  const TokenSpan wanted = TokenSpan(request.tokens).first(request.len() - 1);
  if (request.names.pages.empty()) {
    request.names.space = hash_namespace(config_.model_fingerprint, request.salt);
  }
  const std::vector<PageHash> hashes = pages_below(request.names, wanted, match);
  if (hashes.empty()) return false;
  const std::int64_t newest = next_transfer_;
  const std::int64_t id = start_transfer(request.salt, wanted, match, hashes);
  if (id < 0) return false;
  request.waits_for = id;
  if (id < newest) return true;  // somebody else's
  request.loads_left -= 1;
  const Transfer& transfer = transfers_.at(id);
  const std::int32_t num_tokens =
      static_cast<std::int32_t>(transfer.hashes.size()) * config_.page_size;
  if (transfer.pages.has_value()) {
    request.loaded_from = match.full_len;
    request.num_loaded = num_tokens;
  } else {
    request.num_fetched = num_tokens;
  }
  return true;
}

bool Scheduler::is_waiting_for_transfer(Request& request) const {
  if (transfers_.contains(request.waits_for)) return true;
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

void Scheduler::apply_ack(const TransferAckInput& ack) {
  tiers_.ack(ack.ticket, ack.ok);
  const auto found = transfer_of_ticket_.find(ack.ticket);
  if (found == transfer_of_ticket_.end()) return;  // written through: nobody waits
  const auto [id, index] = found->second;
  transfer_of_ticket_.erase(found);
  Transfer& transfer = transfers_.at(id);
  if (transfer.pages.has_value()) {
    transfer.is_there[static_cast<std::size_t>(index)] = ack.ok ? 1 : 0;
  }
  if (--transfer.num_outstanding == 0) finish_transfer(id);
}

// What came without a gap enters the tree; the rest is computed by whoever wants it.
void Scheduler::finish_transfer(std::int64_t id) {
  auto node = transfers_.extract(id);
  Transfer& transfer = node.mapped();
  for (const PageHash& hash : transfer.hashes) {
    (transfer.pages.has_value() ? loading_ : fetching_).erase(hash);
  }
  if (!transfer.pages.has_value()) return;
  num_loads_ -= 1;
  const auto num_there = static_cast<std::int32_t>(
      std::ranges::find(transfer.is_there, 0) - transfer.is_there.begin());
  if (num_there == 0) return;
  adopted_.clear();
  const TokenSpan tokens =
      TokenSpan(transfer.tokens).first(static_cast<std::size_t>(num_there) * config_.page_size);
  tree_.publish(*transfer.prefix, tokens, transfer.pages->split_front(num_there), adopted_);
}

// ---- prefill elsewhere -------------------------------------------------------------------------

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

// ---- from outside ------------------------------------------------------------------------------

PrefixDepth Scheduler::query_prefix(TokenSpan tokens, const std::string& salt) const {
  const PrefixMatch match = tree_.find(salt, tokens);
  PrefixDepth depth{match.len(), 0, 0};
  if (!tiers_.is_enabled()) return depth;
  PageNames names{hash_namespace(config_.model_fingerprint, salt), {}};
  for (const PageHash& hash : pages_below(names, tokens, match)) {
    (tiers_.is_in_l2(hash) ? depth.l2 : depth.l3) += config_.page_size;
  }
  if (depth.l2 + depth.l3 > 0) depth.l1 = match.full_len;
  return depth;
}

std::int32_t Scheduler::move(TokenSpan tokens, MoveTarget target, const std::string& salt) {
  PrefixMatch match = tree_.find(salt, tokens);
  PageNames names{hash_namespace(config_.model_fingerprint, salt), {}};
  if (target == MoveTarget::kL1) {
    const std::vector<PageHash> hashes = pages_below(names, tokens, match);
    if (hashes.empty()) return 0;
    const std::int64_t newest = next_transfer_;
    const std::int64_t id = start_transfer(salt, tokens, match, hashes);
    return id < newest ? 0 : static_cast<std::int32_t>(transfers_.at(id).hashes.size());
  }
  if (target == MoveTarget::kL2) {
    if (match.node == nullptr || match.full_len == 0) return 0;
    const NodeRef kept = tree_.pin(salt, match);  // no end of it goes while stores make room
    if (!write_through(kept.node(), 0)) return 0;
  }
  std::int32_t num_pages = tree_.drop(salt, tokens, 0);
  if (target == MoveTarget::kL2) return num_pages;
  // Named from the start; from its end on, until somebody else's continuation.
  const auto num_full = static_cast<std::int32_t>(tokens.size()) / config_.page_size;
  if (num_full > 0) page_hash(names, tokens, num_full - 1);
  for (auto at = names.pages.rbegin(); at != names.pages.rend(); ++at) {
    num_pages += tiers_.is_in_l2(*at) || tiers_.is_in_l3(*at) ? 1 : 0;
    if (!tiers_.drop(*at)) break;
  }
  return num_pages;
}

// Every name is checked against the tokens it stands for before anything is taken.
std::int32_t Scheduler::adopt(Tier tier, TokenSpan tokens, std::span<const PageHash> hashes,
                              std::span<const PageId> pages, const std::string& salt) {
  if (!tiers_.is_enabled()) reject("tier", "there is one tier only: num_l2_pages is 0");
  if (tier == Tier::kL3 && !config_.use_l3) reject("tier", "'l3' needs use_l3");
  if (tokens.size() != hashes.size() * static_cast<std::size_t>(config_.page_size)) {
    reject("token_ids", std::to_string(tokens.size()) + " tokens are not " +
                            std::to_string(hashes.size()) + " full pages");
  }
  if (pages.size() != (tier == Tier::kL2 ? hashes.size() : 0)) {
    reject("pages", std::to_string(pages.size()) + " pages for " + std::to_string(hashes.size()) +
                        " names; l2 needs one each, l3 none");
  }
  PageNames names{hash_namespace(config_.model_fingerprint, salt), {}};
  std::vector<std::int32_t> seen;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    if (page_hash(names, tokens, static_cast<std::int32_t>(i)) != hashes[i]) {
      reject("page_hashes" + index, "is not the name of these tokens");
    }
    if (tier == Tier::kL3) continue;
    // Known by another branch that was taken in before: nothing is taken, its page is not read.
    if (tiers_.is_in_l2(hashes[i]) || tiers_.is_coming_to_l2(hashes[i])) continue;
    const std::int32_t page = pages[i].value;
    if (page < 0 || page >= config_.num_l2_pages ||
        tiers_.pool().owner_of(pages[i]) != PageOwner::kFree) {
      reject("pages" + index, std::to_string(page) + " is not a free L2 page");
    }
    seen.push_back(page);
  }
  std::ranges::sort(seen);
  if (std::ranges::adjacent_find(seen) != seen.end()) reject("pages", "a page appears twice");
  std::int32_t num_taken = 0;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const PageHash& parent = i > 0 ? hashes[i - 1] : kRootHash;
    if (tier == Tier::kL2) {
      num_taken += tiers_.is_in_l2(hashes[i]) || tiers_.is_coming_to_l2(hashes[i]) ? 0 : 1;
      tiers_.adopt_l2(hashes[i], parent, pages[i]);
    } else {
      num_taken += tiers_.is_in_l3(hashes[i]) ? 0 : 1;
      tiers_.adopt_l3(hashes[i], parent);
    }
  }
  return num_taken;
}

}  // namespace moorage
