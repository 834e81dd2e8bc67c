// SPDX-License-Identifier: Apache-2.0
// Who runs, who keeps memory, who gives it back: submit, next_plan, advance.
//
// Does not know: any clock (time is an input), tensors, sessions. Deterministic: the same calls
// give bit-identical plans.
//
// Invariants:
//   free + request + tree + in-flight pages == num_pages, each page in one place
//   running_ holds the Bootstrapping, Loading, Prefilling and Decoding requests, best first; waiting_ the Waiting ones
//   memory a step in flight may touch is not handed out before its result is in
//   a page that is being loaded is in no tree: a step reads it only if its row says what it waits
//   for, and such a row's result is not taken before those loads are acked
//   the first of running_ always progresses: all others can be made to give way
// Thread rule: one thread.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/config.h"
#include "events/kv_events.h"
#include "pages/page_pool.h"
#include "prefix/radix_tree.h"
#include "requests/request.h"
#include "requests/transitions.h"
#include "schedule/leases.h"
#include "schedule/move_orders.h"
#include "schedule/plan.h"
#include "schedule/probes.h"
#include "schedule/slots.h"
#include "schedule/wait_queue.h"
#include "tiers/lower_tiers.h"
#include "tiers/write_through.h"

namespace moorage {

struct AbortInput {
  RequestId request_id;
};
struct TransferAckInput {
  std::int64_t ticket;
  bool ok;
};
struct RemotePrefillInput {  // nothing of the other engine writes to the request's pages any more
  RequestId request_id;
  bool ok;
};
struct ProbeDoneInput {  // the first num_pages of the probed pages are in L3
  std::int64_t probe_id;
  std::int64_t num_pages;
};
struct SendDoneInput {  // the other engine reads the request's pages no longer
  RequestId request_id;
  bool ok;
};
using InputEvent = std::variant<StepResult, AbortInput, TransferAckInput, RemotePrefillInput,
                                ProbeDoneInput, SendDoneInput>;

struct Stats {
  std::int64_t num_steps = 0;
  std::int64_t num_submitted = 0;
  std::int64_t num_finished = 0;
  std::int64_t num_aborted = 0;
  std::int64_t num_failed = 0;
  std::int64_t num_retractions = 0;
  std::int64_t num_prompt_tokens = 0;  // of admissions, and how many of them were cached
  std::int64_t num_cached_tokens = 0;
  std::int64_t num_page_copies = 0;
  std::int64_t num_duplicate_pages = 0;
  std::int64_t num_loaded_pages = 0;    // from L2, and tokens of admissions found that way
  std::int64_t num_l2_cached_tokens = 0;
  std::int64_t num_l3_cached_tokens = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t num_probes = 0;
  std::int64_t num_probe_hits = 0;       // pages that probes found
  std::int64_t num_declined_pages = 0;   // in lower tiers, but cheaper to compute
};

// Tokens of a prefix by the nearest tier that has them.
struct PrefixDepth {
  std::int32_t l1 = 0;
  std::int32_t l2 = 0;
  std::int32_t l3 = 0;
  std::int32_t pending = 0;  // in pages that tickets or standing orders are about to move
};

// Until when the owner of a prefix would like it in a tier; 0: no such wish.
struct HoldTimes {
  TimeMs l1_until_ms = 0;
  TimeMs l2_until_ms = 0;
  TimeMs l3_until_ms = 0;
};

class Scheduler {
 public:
  static constexpr std::int32_t kMaxStepsInFlight = 2;
  // A step of a lone prompt has all its tokens up to a context where a token costs this many times
  // what it costs at the start, in halves; then fewer, so that it takes no longer than there.
  static constexpr std::int64_t kLoneCostHalves = 5;
  // While memory is short: steps without a long prompt after each one with it.
  static constexpr std::int32_t kStreamSteps = 3;

  explicit Scheduler(SchedulerConfig config);

  // Throws std::invalid_argument naming the field; then none of the specs was inserted.
  void submit(std::span<const RequestSpec* const> specs);

  // Requires: fewer than kMaxStepsInFlight results outstanding, else throws std::logic_error.
  void next_plan(TimeMs now_ms, Plan& plan);

  // Throws std::invalid_argument before anything is applied.
  std::vector<EndedRequest> advance(std::span<const InputEvent> events);

  PrefixDepth query_prefix(TokenSpan tokens, const std::string& salt) const;
  // Brings the full pages of a prefix to a tier and lets go of what lies above it, unless used or
  // leased (kL1 lets go of nothing; kNone forgets all). What cannot be had at once stays a standing
  // order; the same call again says how far it is.
  MoveResult move(TokenSpan tokens, MoveTarget target, const std::string& salt);
  // Takes in full pages that survived a restart; throws std::invalid_argument, then none was.
  // `before`: the page they follow, which need not be anywhere.
  struct Fragment {
    PageHash before = kRootHash;
    std::int64_t start = 0;  // tokens up to and with that page
  };
  std::int32_t adopt(Tier tier, TokenSpan tokens, std::span<const PageHash> hashes,
                     std::span<const PageId> pages, const std::string& salt, Fragment fragment);
  // The store let go of these; what L2 has of them is stored again. Returns those it was thought to
  // have.
  std::int32_t lose_l3(std::span<const PageHash> hashes);
  // In every tier; returns the pages freed in L1.
  std::int32_t drop_prefix(TokenSpan tokens, std::int32_t keep_tokens, const std::string& salt) {
    return forget(salt, tokens, keep_tokens).num_l1_pages;
  }
  // Says how likely the end of a prefix is to be continued, and until when it is wanted where;
  // returns the tokens of it found.
  std::int32_t hint_prefix(TokenSpan tokens, std::int32_t return_permille, const std::string& salt,
                           HoldTimes hold = {});
  void set_costs(const Costs& costs) { costs_ = costs; }
  // From the next plan on; throws std::invalid_argument for an unknown request or a number outside
  // [0, kMaxDraftTokens].
  void set_num_draft_tokens(RequestId id, std::int64_t num_draft_tokens);
  LeaseGrant lease(LeaseRequest request) { return leases_.lease(std::move(request), now_ms_); }
  bool release(std::int64_t lease_id) { return leases_.release(lease_id); }
  std::vector<LeaseEvent> drain_lease_events() { return leases_.drain_events(); }
  std::vector<KvEvent> drain_kv_events() { return kv_log_.drain(); }
  std::vector<Send> drain_sends() { return std::exchange(sends_, {}); }

  const SchedulerConfig& config() const { return config_; }
  const PagePool& pool() const { return pool_; }
  const RadixTree& tree() const { return tree_; }
  const LowerTiers& tiers() const { return tiers_; }
  const KvEventLog& kv_log() const { return kv_log_; }
  const LeaseBook& leases() const { return leases_; }
  const Stats& stats() const { return stats_; }
  std::int64_t num_running() const { return static_cast<std::int64_t>(running_.size()); }
  std::int64_t num_waiting() const {
    return static_cast<std::int64_t>(waiting_.size() + arrivals_.size());
  }
  std::int64_t num_leaving() const { return num_leaving_; }
  std::int64_t num_sending() const { return num_sending_; }
  std::int64_t num_orders() const { return static_cast<std::int64_t>(orders_.size()); }
  std::int64_t num_probes_open() const { return static_cast<std::int64_t>(probes_.size()); }
  std::int32_t num_steps_in_flight() const { return num_steps_in_flight_; }

  std::string find_broken_invariant() const;  // empty: none; walks everything

 private:
  struct StepRow {
    Request* request;
    std::int32_t start;
    std::int32_t len;
    bool samples;
    bool is_prefill;
    std::int64_t load;     // transfer that was filling pages it reads; -1: none
    bool is_void = false;  // one of those pages was bad: what the row computes counts for nothing
  };
  struct Step {
    StepId id;
    std::vector<StepRow> rows;
    std::vector<OwnedPages> replaced;  // duplicates the step may still read
    std::vector<PageHold> copied;      // what it copies from: a load does not wait for the step
  };
  struct TableChange {
    RequestId request_id;
    std::int32_t index;
    PageId page;
  };
  enum class Admitted : std::uint8_t { kYes, kFollows, kNoMemory };
  // All that decides whether the request at the head fits: while it stands, so does the answer.
  struct Blocked {
    std::int64_t request_id = -1;
    std::int64_t tree_version = 0;
    std::int32_t num_free = 0;
    std::int32_t num_held = 0;
    std::int32_t num_promised = 0;
    std::int64_t num_others = 0;
    bool operator==(const Blocked&) const = default;
  };
  // Tickets that belong together, and where what they bring goes.
  struct ToL2 {};     // fetches
  struct ToTree {     // loads of a run of pages behind a prefix: nobody reads them before they are
    NodeRef prefix;   // all there and in the tree
    OwnedPages pages;
    std::vector<TokenId> tokens;
  };
  struct ToRequest {  // loads into the tail of a request, behind num_computed: its own rows read
    RequestId id;     // them, told what to wait for, and nobody else
  };
  struct Transfer {
    std::variant<ToL2, ToTree, ToRequest> target;
    std::vector<PageHash> hashes;
    std::int64_t first_ticket = -1;  // of loads, which are numbered in a row
    std::int32_t num_outstanding = 0;
    std::vector<std::uint8_t> is_there;
  };
  // What advance() will have heard of a transfer by the time it applies some event.
  struct Heard {
    std::int32_t num_acks = 0;
    bool has_lost = false;
  };
  using HeardOf = std::map<std::int64_t, Heard>;

  // intake.cpp
  void validate(std::span<const RequestSpec* const> specs) const;
  void take_in_arrivals();
  std::int32_t count_uncached(Request& request) const;
  std::vector<TokenId> take_buffer(std::size_t num_tokens);  // empty, with that capacity
  void keep_buffer(std::vector<TokenId> buffer);

  // planning.cpp
  void plan_running(Plan& plan);
  bool is_turn_of_streams() const;
  void widen_for(const Request& request);
  void plan_long_prefills(Plan& plan);
  void take_what_is_left(Plan& plan);
  std::int32_t quarter_of_step() const;
  bool is_short(std::int32_t num_tokens) const;
  void plan_row(Request& request, std::int32_t len, bool is_prefill, Plan& plan);
  static bool wants_prefill(const Request& request);
  bool wants_decode(const Request& request) const;
  std::int32_t num_decode_tokens(const Request& request) const;
  bool make_room(std::int32_t num_pages);
  std::int32_t grow_tail(Request& request, std::int32_t end, Plan& plan);
  void emit_table_changes(Plan& plan);
  void emit_rows(Plan& plan);
  void emit_row(const StepRow& row, Plan& plan);

  // retraction.cpp
  static bool is_running(const Request& request);
  std::int32_t reserve(Request& request, std::int32_t len, Plan& plan);
  std::int64_t run_value(const Request& request) const;
  bool gives_way_before(const Request& a, const Request& b) const;
  Request& choose_victim() const;
  void retract(Request& request);
  void requeue(Request& request);
  std::int32_t num_pages_given_by(const Request& request) const;
  void preempt_for(const Request& urgent, std::int32_t num_lacking_pages);

  // admission.cpp
  void plan_admissions(Plan& plan);
  Admitted try_admit(Request& request, Plan& plan);
  bool must_wait(Request& request) const;
  static bool is_prefilling(const Request& request);
  bool is_following(const Request& request) const;
  bool find_leader(Request& request, std::int32_t cached_full_len);
  std::int32_t num_lacking_pages(const Request& request, PrefixMatch& match) const;
  std::int32_t num_promised_pages() const;
  std::int32_t num_spare_pages() const;
  // `below`: pages behind the match to be loaded while it runs.
  void admit(Request& request, PrefixMatch match, std::span<const PageHash> below, Plan& plan);
  void insert_running(Request& request);
  Blocked what_decides(const Request& request) const;

  // transfers.cpp
  const PageHash& page_hash(PageNames& names, TokenSpan tokens, std::int32_t index) const;
  std::vector<PageHash> pages_below(PageNames& names, TokenSpan tokens,
                                    const PrefixMatch& match) const;
  std::vector<PageHash> pages_below(Request& request, TokenSpan tokens,
                                    const PrefixMatch& match) const;
  std::int64_t start_transfer(const std::string& salt, TokenSpan tokens, PrefixMatch match,
                              std::span<const PageHash> hashes);
  std::int64_t start_fetch(std::span<const PageHash> hashes);
  std::int64_t start_load(const std::string& salt, TokenSpan tokens, PrefixMatch match,
                          std::span<const PageHash> hashes);
  std::vector<PageHash> worth_bringing(Request& request, const PrefixMatch& match);
  bool waits_for_transfer(Request& request, const PrefixMatch& match,
                          std::span<const PageHash> below);
  bool is_waiting_for_transfer(Request& request) const;
  Admission make_admission(const Request& request, SlotId slot, const PrefixMatch& match) const;
  void apply_ack(const TransferAckInput& ack, std::vector<EndedRequest>& ended);
  void finish_transfer(std::int64_t id, std::vector<EndedRequest>& ended);
  void emit_moves(Plan& plan);

  // loads.cpp
  bool may_run_while_loading(const Request& request, std::span<const PageHash> below) const;
  std::int64_t issue_loads(Transfer& transfer, std::span<const PageHash> hashes, OwnedPages& pages);
  std::int32_t start_own_load(Request& request, std::span<const PageHash> hashes,
                              OwnedPages& tail);
  void finish_own_load(RequestId id, std::int32_t num_pages, std::int32_t num_there,
                       std::vector<EndedRequest>& ended);
  void note_heard(const TransferAckInput& ack, HeardOf& heard) const;
  void validate_loads(const std::string& field, const Step& step, const HeardOf& heard) const;
  std::array<std::int64_t, 2> tickets_of_load(const StepRow& row) const;

  // moves.cpp
  PageNames names_of(const std::string& salt, TokenSpan tokens, const PrefixMatch& match) const;
  struct Forgotten {
    std::int32_t num_l1_pages = 0;
    std::int32_t num_lower_pages = 0;
    std::int32_t num_unwanted = 0;  // of the lower ones: go when they have come
  };
  Forgotten forget(const std::string& salt, TokenSpan tokens, std::int32_t keep_tokens);
  MoveResult work_on(MoveOrder& order);
  void probe_for(MoveOrder& order, const PrefixMatch& match);
  void note_answer(std::int64_t probe_id);
  MoveResult bring_up(MoveOrder& order, PrefixMatch match);
  MoveResult bring_to_l2(MoveOrder& order, const PrefixMatch& match);
  MoveResult bring_to_l3(MoveOrder& order, const PrefixMatch& match);
  bool send_down(const MoveOrder& order, std::span<const RadixTree::NamedPage> pages,
                 std::size_t index);
  bool is_over(MoveOrder& order, const MoveResult& result) const;
  void work_on_orders();
  void end_holds();

  // probes.cpp
  void start_probe(Request& request);
  std::int64_t ask_store(std::span<const PageHash> names, std::size_t first);
  bool is_waiting_for_probe(const Request& request) const;
  void apply_probe(const ProbeDoneInput& input);
  void emit_probes(Plan& plan);
  std::size_t num_worth_loading(const std::vector<PageHash>& hashes, std::int32_t from) const;
  std::int64_t prefill_ns(std::int32_t from, std::int32_t end) const;

  // elsewhere.cpp
  bool bootstrap(Request& request, Plan& plan);
  void apply_remote_prefill(const RemotePrefillInput& input, std::vector<EndedRequest>& ended);
  void finish(Request& request);
  void apply_send_done(const SendDoneInput& input, std::vector<EndedRequest>& ended);

  // commit.cpp
  void validate(std::span<const InputEvent> events) const;
  void validate_rows(const StepResult& result, const Step& step, const HeardOf& heard) const;
  void commit_step(const StepResult& result, std::vector<EndedRequest>& ended);
  void commit_row(const StepRow& row, std::span<const TokenId> accepted, bool finished,
                  bool failed);
  void abort(Request& request, std::vector<EndedRequest>& ended);
  template <class E>
  void fire(Request& request, E event);
  void leave_running(Request& request);
  void settle(Request& request, std::vector<EndedRequest>& ended);
  void publish_full_pages(Request& request);
  std::int32_t publish_rest(Request& request, EndedRequest& ended);
  void end(Request& request, std::vector<EndedRequest>& ended);

  Request* find_request(RequestId id) const;
  Step& oldest_step() { return steps_[first_step_]; }
  Step& newest_step() {
    return steps_[(first_step_ + num_steps_in_flight_ - 1) % kMaxStepsInFlight];
  }

  // Constant after construction.
  const SchedulerConfig config_;

  // Owned by the caller's thread. Order matters: what holds pages dies before what lends them.
  KvEventLog kv_log_;
  PagePool pool_;
  LowerTiers tiers_;
  SlotPool slots_;
  RadixTree tree_;
  WriteThrough write_through_;
  LeaseBook leases_;
  std::unordered_map<std::int64_t, std::unique_ptr<Request>> requests_;
  std::vector<Request*> arrivals_;  // submitted, not yet seen by a plan
  WaitQueue waiting_;
  std::vector<Request*> running_;
  std::int64_t num_leaving_ = 0;  // Draining, Retracting and Sending requests
  std::int64_t num_sending_ = 0;  // the Sending ones of them
  std::array<Step, kMaxStepsInFlight> steps_;
  std::int32_t first_step_ = 0;
  std::int32_t num_steps_in_flight_ = 0;
  std::vector<NodeRef> copy_sources_;  // of the plan that is made: nobody evicts them meanwhile
  std::map<std::int64_t, Transfer> transfers_;
  std::map<std::int64_t, std::pair<std::int64_t, std::int32_t>> transfer_of_ticket_;
  std::map<PageHash, std::int64_t> loading_;   // pages on their way to L1, and by which transfer
  std::map<PageHash, std::int64_t> fetching_;  // the same to L2
  std::int64_t next_transfer_ = 0;
  std::int64_t num_loads_ = 0;      // transfers that fill L1 pages
  std::int64_t num_own_loads_ = 0;  // of them, those into the tail of a request that runs
  std::map<std::int64_t, MoveOrder> orders_;  // in order of their making
  std::int64_t next_order_ = 0;
  std::deque<std::pair<TimeMs, PageHash>> asked_;  // when the store answered for whose last page
  std::map<std::int64_t, Probe> probes_;
  std::map<PageHash, std::int64_t> probing_;  // first pages, and by which probe
  std::int64_t next_probe_ = 0;
  std::vector<std::int64_t> new_probes_;      // not told of yet
  Costs costs_;
  std::vector<Send> sends_;
  Blocked blocked_;
  std::vector<TableChange> table_changes_;
  std::vector<std::int64_t> retracted_;  // since the last plan
  Stats stats_;
  TimeMs now_ms_ = 0;
  std::int64_t next_step_id_ = 0;
  std::int64_t next_sequence_ = 0;
  std::int32_t decode_cursor_ = 0;
  std::int32_t num_steps_since_long_ = kStreamSteps;  // at most that many are counted

  // Scratch of one call, kept for its capacity.
  std::vector<Request*> order_;
  std::vector<std::vector<TokenId>> spare_buffers_;
  std::vector<StepRow> prefill_rows_;
  std::vector<StepRow> decode_rows_;
  std::vector<RadixTree::Adopted> adopted_;
  std::int32_t prefill_budget_ = 0;
  bool is_for_short_ones_ = false;  // what is left of that
  bool has_one_request_ = false;    // running or waiting: nobody else is there
  bool is_short_of_pages_ = false;
};

}  // namespace moorage
