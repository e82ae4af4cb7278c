#include "apps/train/loop/integrity.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "apps/train/launch/agreed.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/json.h"
#include "core/ops/hash.h"
#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::train {
namespace {

constexpr size_t most_named = 4;  // tensors in a message

std::string to_text(std::span<const Difference> differences) {
  JsonValue all = JsonValue::array({});
  for (const Difference& d : differences) {
    JsonValue ranks = JsonValue::array({});
    for (const int rank : d.ranks) ranks.push_back(rank);
    all.push_back(JsonValue::object({{"tensor", d.tensor}, {"ranks", ranks}, {"majority", d.majority}}));
  }
  return all.dump();
}

std::vector<Difference> from_text(const std::string& text) {
  std::vector<Difference> differences;
  const JsonValue all = parse_json(text, "differences of replicas");
  for (const JsonValue& item : all.items()) {
    Difference& d = differences.emplace_back();
    d.tensor = item.get_string("tensor");
    d.majority = item.get_bool("majority");
    for (const JsonValue& rank : item.at("ranks").items()) d.ranks.push_back(static_cast<int>(rank.as_int()));
  }
  return differences;
}

std::string rank_text(const Run& run, std::span<const int> ranks) {
  std::vector<std::string> names;
  for (const int rank : ranks)
    names.push_back(fmt::format("{} ({})", rank, run.world.hosts()[static_cast<size_t>(rank)]));
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(names, ", "));
}

std::string tensor_text(const std::set<std::string>& tensors) {
  std::vector<std::string> names(tensors.begin(), tensors.end());
  const size_t more = names.size() > most_named ? names.size() - most_named : 0;
  names.resize(names.size() - more);
  std::string text = fmt::format("{}", fmt::join(names, ", "));
  return more > 0 ? fmt::format("{} and {} more", text, more) : text;
}

// Prints the message and ends the run on all ranks.
[[noreturn]] void leave(Run& run, const std::string& text, std::span<const int> ranks) {
  if (run.world.rank() == 0) log::error_text(text);
  throw AgreedExit{Exit::silent_corruption, text,
                   ranks.size() == 1 ? std::optional<int>(ranks.front()) : std::nullopt};
}

constexpr const char* remedy =
    "Fix: test or leave out that host (memory, GPU, processor); the same command resumes from the last "
    "checkpoint, in which the replicas agreed";

}  // namespace

Difference compare(const std::string& tensor, std::span<const int64_t> hashes, std::span<const int> ranks) {
  std::map<int64_t, size_t> count;
  for (const int64_t hash : hashes) ++count[hash];
  const auto most =
      std::max_element(count.begin(), count.end(), [](auto& a, auto& b) { return a.second < b.second; });
  Difference d{.tensor = tensor, .majority = 2 * most->second > hashes.size()};
  for (size_t i = 0; i < hashes.size(); ++i)
    if (!d.majority || hashes[i] != most->first) d.ranks.push_back(ranks[i]);
  std::sort(d.ranks.begin(), d.ranks.end());
  return d;
}

std::vector<int> suspects(std::span<const Difference> differences) {
  const bool decided =
      std::any_of(differences.begin(), differences.end(), [](const Difference& d) { return d.majority; });
  std::map<int, int> count;
  for (const Difference& d : differences)
    if (d.majority || !decided)
      for (const int rank : d.ranks) ++count[rank];
  int most = 0;
  for (const auto& [rank, n] : count) most = std::max(most, n);
  std::vector<int> out;
  for (const auto& [rank, n] : count)
    if (decided || n == most) out.push_back(rank);
  return out;
}

ReplicaCheck::ReplicaCheck(Run& run) : run_(run), tensors_(engine::kept_tensors(*run.engine)) {
  for (const engine::KeptTensor& t : tensors_)
    for (const parallel::GroupId& id : t.groups)
      if (std::find(groups_.begin(), groups_.end(), id) == groups_.end()) groups_.push_back(id);
  std::sort(groups_.begin(), groups_.end(), parallel::canonical_less);
  std::erase_if(tensors_, [](const engine::KeptTensor& t) { return t.groups.empty(); });
  int64_t any = groups_.empty() ? 0 : 1;
  run.world.comm().all_reduce(std::span(&any, 1), comm::Reduce::max);
  any_ = any != 0;
}

void ReplicaCheck::check(int64_t step) {
  if (!any_) return;
  const trace::Range range("replica_check", trace::Kind::report);
  engine::Engine& engine = *run_.engine;
  engine.finish_gathers();
  const std::vector<int64_t> hashes = engine::hashes_of(engine, tensors_);
  // One operation for both extremes: the greatest complement belongs to the least hash.
  std::vector<std::vector<size_t>> different;  // tensors, by group
  int64_t bad = 0;
  for (const parallel::GroupId& id : groups_) {
    std::vector<size_t> members;
    for (size_t i = 0; i < tensors_.size(); ++i)
      if (std::find(tensors_[i].groups.begin(), tensors_[i].groups.end(), id) != tensors_[i].groups.end())
        members.push_back(i);
    std::vector<int64_t> extremes;
    for (const size_t i : members) extremes.push_back(hashes[i]);
    for (const size_t i : members) extremes.push_back(~hashes[i]);
    run_.placement.groups().host(id).all_reduce(std::span(extremes), comm::Reduce::max);
    std::vector<size_t>& here = different.emplace_back();
    for (size_t k = 0; k < members.size(); ++k)
      if (extremes[k] != ~extremes[members.size() + k]) here.push_back(members[k]);
    bad += static_cast<int64_t>(here.size());
  }
  run_.world.comm().all_reduce(std::span(&bad, 1), comm::Reduce::max);
  if (bad == 0) return;

  std::vector<Difference> found;
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (different[g].empty()) continue;  // on all members alike
    comm::Communicator& group = run_.placement.groups().host(groups_[g]);
    const auto size = static_cast<size_t>(group.size());
    std::vector<int64_t> own{run_.world.rank()};
    for (const size_t i : different[g]) own.push_back(hashes[i]);
    std::vector<int64_t> all(own.size() * size);
    group.all_gather(std::span<const int64_t>(own), std::span(all));
    if (group.rank() != 0) continue;  // one rank of each group reports
    std::vector<int> ranks;
    for (size_t r = 0; r < size; ++r) ranks.push_back(static_cast<int>(all[r * own.size()]));
    for (size_t k = 0; k < different[g].size(); ++k) {
      std::vector<int64_t> of_tensor;
      for (size_t r = 0; r < size; ++r) of_tensor.push_back(all[r * own.size() + 1 + k]);
      found.push_back(compare(tensors_[different[g][k]].name, of_tensor, ranks));
    }
  }
  const std::vector<std::string> texts = run_.world.comm().gather_texts(to_text(found));
  found.clear();
  for (const std::string& text : texts)
    for (const Difference& d : from_text(text)) found.push_back(d);
  const std::vector<int> wrong = suspects(found);
  std::set<std::string> tensors;
  for (const Difference& d : found) tensors.insert(d.tensor);
  const bool majority =
      std::any_of(found.begin(), found.end(), [](const Difference& d) { return d.majority; });
  leave(run_,
        fmt::format(
            "silent data corruption: after step {}, {} {} in {}{}. {}", step, rank_text(run_, wrong),
            majority || wrong.size() == 1 ? "has other bits than the other replicas" : "have different bits",
            tensor_text(tensors), wrong.size() == 1 ? "" : "; which of them is right cannot be told", remedy),
        wrong);
}

namespace {

// Hashes of what a repeated step computes: of each parameter's gradient, and last of the log-probabilities.
std::vector<int64_t> repeated_hashes(Run& run, std::vector<fault::Fault> faults) {
  engine::Engine& engine = *run.engine;
  ops::Exec& exec = engine.exec();
  std::vector<int64_t> hashes(engine.plan().parameters.all.size() + 1);
  const Tensor spare = engine.spare_sums();
  const Tensor sum = make_tensor(spare.data, DType::i64, {1}, spare.device);
  const auto add = [&](size_t at, const Tensor& t) {
    ops::upload(exec, sum, &hashes[at]);
    ops::add_hash(exec, {.x = make_tensor(t.data, t.dtype, {t.numel()}, t.device), .out = sum});
    ops::download(exec, sum, &hashes[at]);
  };
  const auto faulty = planter(engine, std::move(faults));
  engine.inspect(engine.objective(),
                 {.gradient =
                      [&](int parameter, const Tensor& gradient) {
                        if (faulty) faulty(parameter, gradient);
                        add(static_cast<size_t>(parameter), gradient);
                      },
                  .log_probs = [&](int, const Tensor& values) { add(hashes.size() - 1, values); }});
  return hashes;
}

}  // namespace

void check_repeated(Run& run, int64_t step) {
  const trace::Range range("recompute_check", trace::Kind::report);
  run.engine->finish_gathers();
  const std::vector<int64_t> first = repeated_hashes(run, {});
  const std::vector<int64_t> second = repeated_hashes(run, fault::planted(fault::Site::repeat, step));
  std::string own;
  const auto& parameters = run.plan().parameters.all;
  if (first.back() != second.back()) {
    own = "the log-probabilities of the targets";
  } else {
    // Gradients are computed from the last layer to the first: the last one that differs came first.
    for (size_t p = parameters.size(); p-- > 0 && own.empty();)
      if (first[p] != second[p]) own = "the gradient of " + parameters[p].parts.front().name;
  }
  int64_t bad = own.empty() ? 0 : 1;
  run.world.comm().all_reduce(std::span(&bad, 1), comm::Reduce::max);
  if (bad == 0) return;
  const std::vector<std::string> texts = run.world.comm().gather_texts(own);
  std::vector<int> ranks;
  std::set<std::string> what;
  for (size_t r = 0; r < texts.size(); ++r) {
    if (texts[r].empty()) continue;
    ranks.push_back(static_cast<int>(r));
    what.insert(texts[r]);
  }
  leave(run,
        fmt::format(
            "silent data corruption: step {} was computed twice from the same bits, and {} has two results "
            "for {}{}. {}",
            step, rank_text(run, ranks), tensor_text(what),
            ranks.size() == 1 ? "" : "; the first of them may have sent wrong numbers to the others", remedy),
        ranks);
}

void plant(ops::Exec& exec, const Tensor& values, const fault::Fault& fault) {
  const int64_t n = values.numel();
  if (fault.element >= n)
    fail(Exit::usage, "NRL_FAULTS: element {} of {} does not exist: this rank has {}", fault.element,
         fault.tensor.empty() ? "the first tensor" : fault.tensor, n);
  const int64_t size = size_of(values.dtype);
  if (fault.bit >= 8 * size)
    fail(Exit::usage, "NRL_FAULTS: bit {} does not exist in {}", fault.bit, name_of(values.dtype));
  const Tensor one = make_tensor(static_cast<std::byte*>(values.data) + fault.element * size, values.dtype,
                                 {1}, values.device);
  uint32_t bits = 0;
  ops::download(exec, one, &bits);
  // All bits are a NaN in every type of weights and gradients.
  bits = fault.kind == fault::Kind::nan ? ~uint32_t{0} : bits ^ (uint32_t{1} << fault.bit);
  ops::upload(exec, one, &bits);
}

void plant(engine::Engine& engine, const fault::Fault& fault) {
  engine.finish_gathers();
  const std::vector<engine::KeptTensor> tensors = engine::kept_tensors(engine);
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const engine::KeptTensor& t) {
    return !t.on_host && (fault.tensor.empty() || t.name == fault.tensor);
  });
  if (found == tensors.end()) {
    std::vector<std::string_view> names;
    for (const engine::KeptTensor& t : tensors) names.push_back(t.name);
    fail(Exit::usage, "NRL_FAULTS: this rank has no tensor {} in the memory of its device{}", fault.tensor,
         did_you_mean(nearest(fault.tensor, names), "; "));
  }
  plant(engine.exec(), found->parts.front(), fault);
}

std::function<void(int, const Tensor&)> planter(engine::Engine& engine, std::vector<fault::Fault> faults) {
  if (faults.empty()) return {};
  return [&engine, faults = std::move(faults)](int parameter, const Tensor& gradient) mutable {
    const model::Parameter& p = engine.plan().parameters.all[static_cast<size_t>(parameter)];
    std::erase_if(faults, [&](const fault::Fault& f) {
      const auto part = std::find_if(p.parts.begin(), p.parts.end(),
                                     [&](const model::Part& one) { return one.name == f.tensor; });
      if (!f.tensor.empty() && part == p.parts.end()) return false;
      fault::Fault here = f;
      if (part != p.parts.end()) here.element += part->offset;
      plant(engine.exec(), gradient, here);
      return true;
    });
  };
}

}  // namespace nrl::train
