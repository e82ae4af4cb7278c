// The end of a save: the manifests of the ranks, and manifest.json, with which the checkpoint exists.
#include <set>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/checkpoint_places.h"
#include "core/io/checkpoint_store.h"
#include "core/io/checkpoint_sums.h"
#include "core/io/crc32c.h"

namespace nrl {
namespace {

JsonLimits report_limits() {
  JsonLimits limits;
  limits.text_bytes = limits.string_bytes = limits.values = size_t{1} << 40;  // trusted text of our own
  return limits;
}

}  // namespace

void CheckpointWriter::record(const std::string& file, const std::vector<ShardSpec>& shards,
                              const SafetensorsWriter& writer, Written& written) {
  written.files.push_back({file, writer.bytes(), writer.file_crc()});
  for (const ShardSpec& s : shards) {
    const TensorChecksum& sum = writer.checksum(s.key);
    CheckpointShard shard;
    shard.file = file;
    shard.key = s.key;
    shard.offset = s.offset;
    shard.count = *checked_product(s.stored_shape);
    shard.run = s.run == 0 ? shard.count : s.run;
    shard.stride = s.run == 0 ? shard.count : s.stride;
    shard.crc32c = sum.crc;
    if (sum.chunks.size() > 1) shard.chunks = sum.chunks;
    const auto [it, added] = written.tensors.try_emplace(s.logical, LogicalTensor{s.dtype, s.shape, {}});
    NRL_CHECK(it->second.dtype == s.dtype && it->second.shape == s.shape,
              "two shapes or dtypes of tensor \"{}\"", s.logical);
    it->second.shards.push_back(std::move(shard));
  }
}

void CheckpointWriter::add_file(const std::string& name, std::string_view text) {
  guard([&] {
    NRL_CHECK(is_plain_name(name) && name != manifest_name, "file name \"{}\"", name);
    File file = File::create(join_path(temporary_, name));
    file.pwrite_all(text.data(), text.size(), 0);
    file.sync();
    file.close();
    shared_.files.push_back({name, text.size(), crc32c(text.data(), text.size())});
  });
}

// Exit::io if no program could read it.
std::string CheckpointWriter::text_of(const CheckpointManifest& manifest) const {
  std::string text = manifest.to_text();
  if (text.size() > options_.manifest_limit)
    fail(Exit::io,
         "{}: the manifest of {} tensors in {} files has {}; expected at most {}, as no program could read "
         "it. "
         "Fix: fewer ranks, or distributed.shard_strategy: ddp",
         final_, manifest.tensors.size(), manifest.files.size(), human_bytes(text.size()),
         human_bytes(options_.manifest_limit));
  return text;
}

// Writes the manifest of what only this rank describes.
void CheckpointWriter::add_own_manifest() {
  if (own_.files.empty()) return;
  guard([&] {
    CheckpointManifest manifest;
    manifest.step = step_;
    manifest.tensors = own_.tensors;
    manifest.files = own_.files;
    add_file(rank_manifest_name(group_.rank), text_of(manifest));
    const CheckpointSums sums(manifest);
    for (CheckpointFile file : own_.files) {
      file.rank = group_.rank;
      file.sums = sums.count_of(file.name);
      shared_.files.push_back(std::move(file));
    }
  });
}

JsonValue CheckpointWriter::report(bool same_places) const {
  JsonValue files = JsonValue::array(), tensors = JsonValue::object();
  for (const CheckpointFile& f : shared_.files) files.push_back(file_to_json(f));
  for (const auto& [name, tensor] : shared_.tensors) tensors.set(name, tensor_to_json(tensor));
  return JsonValue::object({{"error", error_to_json(error_)},
                            {"same_places", same_places},
                            {"files", files},
                            {"tensors", tensors}});
}

CheckpointWriter::Merged CheckpointWriter::merge(const std::vector<std::string>& reports,
                                                 const JsonValue& state) const {
  Merged merged;
  CheckpointManifest& m = merged.manifest;
  m.step = step_;
  m.state = state;
  std::set<std::string> names;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const JsonValue r =
        parse_json(reports[rank], fmt::format("the report of rank {}", rank), report_limits());
    if (const auto error = error_from_json(r.at("error"))) {
      fail(error->code(), "checkpoint at step {} failed{}: {}", step_,
           reports.size() > 1 ? fmt::format(" on rank {}", rank) : std::string(), error->what());
    }
    merged.same_places = merged.same_places && r.get_bool("same_places");
    for (const JsonValue& f : r.at("files").items()) {
      m.files.push_back(file_from_json(f));
      NRL_CHECK(names.insert(m.files.back().name).second, "two ranks wrote {}", m.files.back().name);
    }
    for (const auto& [name, value] : r.at("tensors").members()) {
      LogicalTensor t = tensor_from_json(name, value);
      const auto [it, added] = m.tensors.try_emplace(name, t);
      if (added) continue;
      NRL_CHECK(it->second.dtype == t.dtype && it->second.shape == t.shape,
                "rank {} has another shape or dtype of tensor \"{}\"", rank, name);
      it->second.shards.insert(it->second.shards.end(), t.shards.begin(), t.shards.end());
    }
  }
  return merged;
}

// Adds the places of the pieces that ranks describe themselves.
void CheckpointWriter::add_places(const std::map<std::string, LogicalTensor>& places,
                                  CheckpointManifest& m) const {
  for (const auto& [name, of_ranks] : places) {
    const auto [it, added] = m.tensors.try_emplace(name, of_ranks);
    NRL_CHECK(it->second.dtype == of_ranks.dtype && it->second.shape == of_ranks.shape,
              "two shapes or dtypes of tensor \"{}\"", name);
    it->second.elsewhere = of_ranks.elsewhere;
  }
  for (const auto& [name, tensor] : m.tensors) {
    try {
      (void)tensor_pieces(name, tensor);
    } catch (const Error& e) {
      fail(Exit::internal, "checkpoint at step {} refused: {}", step_, e.what());
    }
  }
}

void CheckpointWriter::publish(const CheckpointManifest& manifest) {
  for (const CheckpointFile& f : manifest.files) {
    const uint64_t size = File::open_read(join_path(temporary_, f.name), File::Links::refuse).size();
    if (size != f.bytes) {
      fail(Exit::io, "{}: {} bytes on disk after {} were written", join_path(temporary_, f.name), size,
           f.bytes);
    }
  }
  const std::string text = text_of(manifest);
  // Also makes the entries of all files durable: it fsyncs the directory.
  write_file_atomic(join_path(temporary_, manifest_name), text);
  if (options_.before_publish) options_.before_publish();
  const std::string trash = join_path(store_, ".trash-" + random_nonce());
  std::string replaced;
  if (!path_exists(final_)) {
    rename_path(temporary_, final_);
  } else if (exchange_paths(temporary_, final_)) {
    replaced = temporary_;
  } else {  // not atomic: the file system has no exchange
    rename_path(final_, trash);
    rename_path(temporary_, final_);
    replaced = trash;
  }
  renamed_ = true;
  fsync_directory(store_);  // committed
  try {
    write_file_atomic(join_path(store_, "LATEST"), step_directory_name(step_) + "\n");
    if (!replaced.empty()) remove_tree(replaced);
  } catch (const Error& e) {
    log::warn("checkpoint at step {} is saved, but: {}", step_, e.what());
  }
}

std::string CheckpointWriter::commit(const JsonValue& state) {
  NRL_CHECK(!done_, "commit was called twice");
  add_own_manifest();
  // The places of the pieces are those of the last save, unless a rank has others now.
  SavePlans none;
  SavePlans& kept = options_.plans ? *options_.plans : none;
  std::string own = places_to_text(own_.tensors, group_.rank);
  const std::vector<std::string> reports = group_.gather(report(kept.saved && kept.places == own).dump());
  Merged merged;
  const bool same = on_rank_zero(group_, [&]() -> std::string {
                      merged = merge(reports, state);
                      return merged.same_places ? "same" : "";
                    }) == "same";
  if (!same) {
    kept.saved = false;
    std::vector<std::string> places = group_.gather(own);
    if (group_.rank == 0) guard([&] { kept.of_ranks = merge_places(places); });
  }
  const std::string path = on_rank_zero(group_, [&] {
    if (error_) throw *error_;
    add_places(kept.of_ranks, merged.manifest);
    publish(merged.manifest);
    done_ = true;
    return final_;
  });
  kept.places = std::move(own);
  kept.saved = true;
  return path;
}

}  // namespace nrl
