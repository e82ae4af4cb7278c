#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>

#include <sys/resource.h>

#include "core/io/checkpoint_reader.h"
#include "core/io/checkpoint_store.h"
#include "core/io/crc32c.h"
#include "tests/catch.h"
#include "tests/io/checkpoint_test_util.h"

using namespace nrl;
using namespace nrl::test;

TEST_CASE("a checkpoint written by 1, 2 or 3 ranks reads the same for any range") {
  for (int writers : {1, 2, 3}) {
    for (int64_t big : {700, 600'001}) {
      CAPTURE(writers, big);
      const TemporaryDirectory dir;
      ThreadRanks ranks(writers);
      const auto errors = ranks.run([&](int rank) {
        CheckpointWriter writer(dir / "ckpt", 120, 1000, ranks.group(rank));
        add_model(writer, rank, writers, 5, big);
        if (writer.commit(JsonValue::object({{"tokens", 12345}})) != dir / "ckpt/step-120") {
          fail(Exit::internal, "another path");
        }
      });
      for (const Caught& e : errors) REQUIRE(e.text.empty());
      CHECK(list_directory(dir / "ckpt") == std::vector<std::string>{"LATEST", "step-120"});
      CHECK(read_file(dir / "ckpt/LATEST", 100) == "step-120\n");
      CHECK(validate_checkpoint(dir / "ckpt/step-120", Validation::full).empty());
      REQUIRE(holds_model(dir / "ckpt/step-120", 5, big));

      CheckpointReader reader(dir / "ckpt/step-120");
      CHECK(reader.manifest().step == 120);
      CHECK(reader.manifest().state.get_int("tokens") == 12345);
      CHECK(reader.read_text("config.json") == "{\"hidden_size\": 5}\n");
      const PhiloxStream random(9, "ranges");
      uint64_t n = 0;
      for (const TensorSpec& t : model_tensors(big)) {
        const std::string wanted = tensor_bytes(t, 5);
        const int64_t total = *checked_product(t.shape), unit = size_of(t.dtype);
        for (int i = 0; i < 40; ++i) {
          const int64_t begin = static_cast<int64_t>(random.bits(n++)) % (total + 1);
          const int64_t count = static_cast<int64_t>(random.bits(n++)) % (total - begin + 1);
          std::string got(static_cast<size_t>(count * unit), '\1');
          reader.read_logical(t.name, begin, count, got.data());
          REQUIRE(got == wanted.substr(static_cast<size_t>(begin * unit), got.size()));
        }
      }
    }
  }
}

TEST_CASE("a checkpoint that does not fit the model is refused with the names") {
  const TemporaryDirectory dir;
  const std::string path = save(dir.path(), 1, 1);
  const CheckpointReader reader(path);
  std::vector<TensorSpec> wanted = model_tensors();
  wanted[0].name = "v";
  wanted[1].shape = {8, 6};
  const auto caught = error_of([&] { reader.check_names(wanted); });
  CHECK(caught.code == 65);
  CHECK(contains(caught.text, "1 missing: v"));
  CHECK(contains(caught.text, "1 different: columns (stored bf16 [6, 8], expected bf16 [8, 6])"));
  CHECK(contains(caught.text, "1 unexpected: w"));
  CHECK_FALSE(contains(error_of([&] { reader.check_names(wanted, true); }).text, "unexpected"));
  CHECK(error_of([&] { CheckpointReader(dir / "step-2"); }).code == 66);
}

TEST_CASE("an error on one rank reaches every rank and changes no checkpoint") {
  const TemporaryDirectory dir;
  save(dir.path(), 1, 1);
  for (int bad : {0, 1, 2}) {
    ThreadRanks ranks(3);
    const auto errors = ranks.run([&](int rank) {
      CheckpointWriter writer(dir.path(), 2, 1000, ranks.group(rank));
      add_model(writer, rank, 3, 2);
      writer.guard([&] {
        if (rank == bad) fail(Exit::io, "the disk of this rank is on fire");
      });
      add_model(writer, rank, 3, 2);  // skipped where it failed, a name twice elsewhere
      writer.commit(JsonValue::object());
    });
    for (const Caught& e : errors) {
      CHECK(e.code != 0);
      CHECK(e.text == errors[0].text);
      CHECK(contains(e.text, "checkpoint at step 2 failed on rank"));
    }
    if (bad == 0) {
      CHECK(errors[2].code == 74);
      CHECK(contains(errors[2].text, "rank 0: the disk of this rank is on fire"));
    }
    CHECK(list_directory(dir.path()) == std::vector<std::string>{"LATEST", "step-1"});
  }
}

TEST_CASE("a checkpoint must hold every element exactly once") {
  const TemporaryDirectory dir;
  const std::vector<float> data(10, 1.0f);
  const auto attempt = [&](std::vector<std::pair<int64_t, int64_t>> ranges) {
    return error_of([&] {
      CheckpointWriter writer(dir.path(), 1, 1000);
      int n = 0;
      for (const auto& [offset, count] : ranges) {
        writer.add_tensors(
            "f" + std::to_string(n++) + ".safetensors",
            {ShardSpec::flat("x", "x", DType::f32, {2, 5}, offset, count)},
            [&](SafetensorsWriter& w) { w.write("x", data.data(), static_cast<size_t>(count) * 4); });
      }
      writer.commit(JsonValue::object());
    });
  };
  CHECK(contains(attempt({{0, 9}}).text, "elements [9, 10) are stored nowhere"));
  CHECK(contains(attempt({{1, 9}}).text, "elements [0, 1) are stored nowhere"));
  CHECK(contains(attempt({{0, 4}, {5, 5}}).text, "elements [4, 5) are stored nowhere"));
  CHECK(contains(attempt({{0, 6}, {5, 5}}).text, "elements [5, 6) are stored twice"));
  CHECK(contains(attempt({{0, 10}, {0, 10}}).text, "twice"));
  CHECK(contains(attempt({{5, 6}}).text, "outside"));
  CHECK(list_directory(dir.path()).empty());
  CHECK(attempt({{4, 6}, {0, 4}}).text.empty());
}

TEST_CASE("NaN never replaces a good checkpoint, and a full disk is detected before writing") {
  const TemporaryDirectory dir;
  save(dir.path(), 1, 1);
  CheckpointWriter::Options options;
  options.refuse_non_finite = true;
  const float bad[2] = {1, std::numeric_limits<float>::quiet_NaN()};
  auto caught = error_of([&] {
    CheckpointWriter writer(dir.path(), 2, 8, {}, options);
    writer.add_tensors("f.safetensors", {ShardSpec::whole("layer.w", DType::f32, {2})},
                       [&](SafetensorsWriter& w) { w.write("layer.w", bad, sizeof bad); });
    CHECK(writer.failed());
    writer.commit(JsonValue::object());
  });
  CHECK(caught.code == 79);
  CHECK(contains(caught.text, "tensor \"layer.w\" holds a NaN"));
  caught = error_of([&] { CheckpointWriter(dir.path(), 2, uint64_t{1} << 60); });
  CHECK(caught.code == 74);
  CHECK(contains(caught.text, "No space left on device"));
  // The state must be JSON: a NaN in it is an internal error, and no checkpoint either.
  caught = error_of([&] {
    CheckpointWriter writer(dir.path(), 2, 8);
    writer.commit(JsonValue::object({{"loss", std::numeric_limits<double>::infinity()}}));
  });
  CHECK(caught.code == 70);
  CHECK(list_directory(dir.path()) == std::vector<std::string>{"LATEST", "step-1"});
}

TEST_CASE("a file shorter on disk than written fails the commit") {
  const TemporaryDirectory dir;
  save(dir.path(), 1, 1);
  for (const bool longer : {false, true}) {
    const Caught caught = error_of([&] {
      CheckpointWriter writer(dir.path(), 2, 100);
      writer.add_file("config.json", "{\"a\": 1}");
      overwrite(writer.directory() + "/config.json", longer ? "{\"a\": 1} " : "{\"a\":");
      writer.commit(JsonValue::object());
    });
    CHECK(caught.code == 74);
    CHECK(contains(caught.text,
                   fmt::format("config.json: {} bytes on disk after 8 were written", longer ? 9 : 5)));
    CHECK(list_directory(dir.path()) == std::vector<std::string>{"LATEST", "step-1"});
  }
}

TEST_CASE("every flipped bit is found, and the file named") {
  const TemporaryDirectory dir;
  const std::string path = save(dir.path(), 3, 1);
  const std::vector<std::string> files = list_directory(path);
  REQUIRE(files == std::vector<std::string>{"config.json", "manifest.json", "model.safetensors",
                                            "optimizer-00001-of-00001.safetensors"});
  const PhiloxStream random(11, "flips");
  int named_tensor = 0;
  for (uint64_t i = 0; i < 200; ++i) {
    const std::string& file = files[random.bits(3 * i) % files.size()];
    const std::string good = read_file(join_path(path, file), 1 << 20);
    std::string bad = good;
    const size_t at = random.bits(3 * i + 1) % bad.size();
    bad[at] = static_cast<char>(bad[at] ^ (1 << random.bits(3 * i + 2) % 8));
    overwrite(join_path(path, file), bad);
    const auto problems = validate_checkpoint(path, Validation::full);
    REQUIRE(problems.size() == 1);
    REQUIRE(contains(problems[0], file));
    if (contains(problems[0], "tensor \"")) ++named_tensor;
    // A load refuses damaged data as well; a flip in a file's header may be harmless to it (a
    // space, the metadata).
    bool same = false;
    const int code = error_of([&] { same = holds_model(path, 1); }).code;
    const bool in_data = contains(problems[0], "tensor \"") || file == "manifest.json";
    REQUIRE((code == 65 || (same && !in_data)));
    overwrite(join_path(path, file), good);
  }
  CHECK(named_tensor > 20);
  CHECK(validate_checkpoint(path, Validation::full).empty());
}

TEST_CASE("damage anywhere in a tensor of several checksums is found, named, and read around") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  constexpr int64_t big = 600'001;  // f32: 2.4 MB, three checksums
  CheckpointWriter writer(dir.path(), 3, 1000);
  add_model(writer, 0, 1, 1, big);
  const std::string path = writer.commit(JsonValue::object()),
                    file = path + "/optimizer-00001-of-00001.safetensors";
  const std::string good = read_file(file, 1 << 23);
  const std::string wanted = tensor_bytes(model_tensors(big)[2], 1);
  const size_t start = good.find(wanted);
  REQUIRE(start != std::string::npos);
  const auto read = [&](int64_t first, int64_t count) {
    return error_of([&] {
      std::string got(static_cast<size_t>(count) * 4, '\0');
      CheckpointReader(path).read_logical("big", first, count, got.data());
      REQUIRE((got == wanted.substr(static_cast<size_t>(first) * 4, got.size())));
    });
  };
  constexpr size_t chunk = 1 << 20;
  for (const size_t at : {size_t{0}, chunk - 1, chunk, 2 * chunk - 1, 2 * chunk, wanted.size() - 1}) {
    CAPTURE(at);
    std::string bad = good;
    bad[start + at] = static_cast<char>(bad[start + at] ^ 0x10);
    overwrite(file, bad);
    const size_t begin = start + at / chunk * chunk, end = std::min(begin + chunk, start + wanted.size());
    const auto problems = validate_checkpoint(path, Validation::full);
    REQUIRE(problems.size() == 1);
    CHECK(contains(problems[0], fmt::format("tensor \"big\", bytes {} to {}", begin, end)));
    CHECK(validate_checkpoint(path, Validation::quick).empty());
    const auto element = static_cast<int64_t>(at / 4);
    CHECK(contains(read(element, 1).text, fmt::format("tensor \"big\", bytes {} to {}", begin, end)));
    CHECK(read(0, big).code == 65);
    const auto other = static_cast<int64_t>(at / chunk == 0 ? chunk / 4 : 0);  // in another chunk
    CHECK(read(other, 1000).code == 0);
  }
}

TEST_CASE("resume takes the newest valid checkpoint and names what is wrong with newer ones") {
  const TemporaryDirectory dir;
  CHECK_FALSE(find_resume(dir / "none").checkpoint.has_value());
  for (int64_t step : {1, 2, 10}) save(dir.path(), step, static_cast<uint64_t>(step));
  auto point = find_resume(dir.path());
  CHECK(point.checkpoint->step == 10);
  CHECK(point.warnings.empty());

  const std::string shard = dir / "step-10/optimizer-00001-of-00001.safetensors";
  const std::string good = read_file(shard, 1 << 20);
  const auto warning = [&] {
    const ResumePoint p = find_resume(dir.path(), Validation::quick);
    REQUIRE(p.checkpoint.has_value());
    std::string text = std::to_string(p.checkpoint->step) + ": ";
    for (const CheckpointEntry& e : p.rejected) text += e.problems.at(0);
    return text + (p.warnings.empty() ? "" : p.warnings[0]);
  };
  overwrite(shard, good.substr(0, good.size() - 1));
  CHECK(contains(warning(),
                 fmt::format("2: {}: size {} != {} in manifest.json", shard, good.size() - 1, good.size())));
  overwrite(shard, "");
  CHECK(contains(warning(), "size 0 !="));
  overwrite(shard, good + "x");
  CHECK(contains(warning(), fmt::format("2: {}: size {} !=", shard, good.size() + 1)));
  remove_tree(shard);
  CHECK(contains(warning(), "2: " + shard + ": missing"));
  make_directory(shard);
  CHECK(contains(warning(), "not a regular file"));
  remove_tree(shard);
  overwrite(shard, good);
  const std::string manifest = read_file(dir / "step-10/manifest.json", 1 << 20);
  remove_tree(dir / "step-10/manifest.json");
  CHECK(contains(warning(), "2: " + (dir / "step-10/manifest.json: missing")));
  overwrite(dir / "step-10/manifest.json", manifest.substr(0, 100));
  CHECK(contains(warning(), "truncated or damaged"));
  overwrite(dir / "step-10/manifest.json", manifest);
  rename_path(dir / "step-10", dir / "step-30");
  CHECK(contains(warning(), "step-30/manifest.json: is of step 10, but the directory is of step 30"));
  rename_path(dir / "step-30", dir / "step-10");

  // LATEST is only a hint (C9).
  remove_tree(dir / "LATEST");
  CHECK(contains(warning(),
                 "10: " + dir.path() + "/LATEST is missing; the newest valid checkpoint is step-10"));
  for (const char* text : {"", "garbage\n", "../etc\n"}) {
    overwrite(dir / "LATEST", text);
    CHECK(contains(warning(), "does not name a checkpoint"));
  }
  overwrite(dir / "LATEST", "step-99\n");
  CHECK(contains(warning(), "names step-99, which does not exist"));
  overwrite(dir / "LATEST", "step-2\n");
  CHECK(contains(warning(), "10: " + dir.path() + "/LATEST names step-2"));
  CHECK(list_checkpoints(dir.path(), Validation::full).size() == 3);
}

TEST_CASE("names of checkpoint directories") {
  CHECK(parse_step_directory_name("step-0") == 0);
  CHECK(parse_step_directory_name("step-1200") == 1200);
  for (const char* name :
       {"step-", "step-01", "step--1", "step-1.tmp-0", "step-1 ", "Step-1", "step-99999999999999999999"}) {
    CHECK_FALSE(parse_step_directory_name(name).has_value());
  }
}

TEST_CASE("retention keeps the newest valid and the pinned") {
  const TemporaryDirectory dir;
  for (int64_t step = 1; step <= 6; ++step) save(dir.path(), step, 1);
  remove_tree(dir / "step-5/manifest.json");
  remove_tree(dir / "step-1/manifest.json");
  CHECK(apply_retention(dir.path(), 2, [](int64_t step) { return step == 2; }) == std::vector<int64_t>{3});
  const std::vector<std::string> left{"LATEST", "step-1", "step-2", "step-4", "step-5", "step-6"};
  CHECK(list_directory(dir.path()) == left);  // the damaged ones too
  CHECK(apply_retention(dir.path(), 100).empty());
  CHECK(error_of([&] { apply_retention(dir.path(), 0); }).code == 70);
  const std::string again = save(dir.path(), 6, 9);  // the same step once more replaces it
  CHECK(holds_model(again, 9));
  CHECK(list_directory(dir.path()) == left);
}

TEST_CASE("retention keeps the newest verified checkpoint, however old") {
  const TemporaryDirectory dir;
  for (int64_t step = 1; step <= 5; ++step) save(dir.path(), step, 1);
  for (const char* step : {"step-1", "step-2"}) CHECK(verify_saved(dir / step).empty());
  CHECK(apply_retention(dir.path(), 2) == std::vector<int64_t>{3, 1});
  CHECK(list_directory(dir.path()) == std::vector<std::string>{"LATEST", "step-2", "step-4", "step-5"});
}

TEST_CASE("retention does not read checkpoints that are known to be valid") {
  const TemporaryDirectory dir;
  for (int64_t step = 1; step <= 4; ++step) save(dir.path(), step, 1);
  std::set<int64_t> known{4};
  CHECK(apply_retention(dir.path(), 3, {}, &known) == std::vector<int64_t>{1});
  CHECK(known == std::set<int64_t>{2, 3, 4});
  overwrite(dir / "step-3/manifest.json", "damaged");  // not read again
  remove_tree(dir / "step-4/manifest.json");
  CHECK(apply_retention(dir.path(), 1, {}, &known) == std::vector<int64_t>{2});
  CHECK(known == std::set<int64_t>{3, 4});
  CHECK(apply_retention(dir.path(), 1).empty());
}

TEST_CASE("ranks divide the files whose sizes they check") {
  const TemporaryDirectory dir;
  const std::string path = save(dir.path(), 1, 1);
  const size_t files = open_manifest(path).manifest.files.size();
  REQUIRE(files > 1);
  for (const CheckpointFile& file : open_manifest(path).manifest.files) {
    const std::string good = read_file(join_path(path, file.name), 1 << 20);
    overwrite(join_path(path, file.name), good + "x");
    int found = 0;
    for (int part = 0; part < 3; ++part)
      found += static_cast<int>(open_manifest(path, part, 3).problems.size());
    CHECK(found == 1);
    overwrite(join_path(path, file.name), good);
  }
}

TEST_CASE("a store without a usable checkpoint is distinguished from an empty one") {
  const TemporaryDirectory dir;
  for (int64_t step : {1, 2}) save(dir.path(), step, 1);
  remove_tree(dir / "step-1/config.json");
  std::string newer = read_file(dir / "step-2/manifest.json", 1 << 20);
  newer.replace(newer.find("nrl-checkpoint-1"), 16, "nrl-checkpoint-9");
  newer.resize(newer.rfind("\"crc32c\":\""));
  newer += fmt::format("\"crc32c\":\"{:08x}\"}}\n", crc32c(newer.data(), newer.size()));
  overwrite(dir / "step-2/manifest.json", newer);
  const ResumePoint point = find_resume(dir.path());
  CHECK_FALSE(point.checkpoint.has_value());
  REQUIRE(point.rejected.size() == 2);
  CHECK(contains(point.rejected[0].problems.at(0), "the format is \"nrl-checkpoint-9\""));
  CHECK(contains(point.rejected[1].problems.at(0), dir / "step-1/config.json: missing"));
}

TEST_CASE("checkpoints set aside keep their content, and nothing touches them again") {
  const TemporaryDirectory dir;
  const RunLock lock(dir.path());
  const std::string store = dir / "c";
  CHECK(set_checkpoints_aside(store, -1, lock).empty());
  for (int64_t step : {1, 2, 3}) save(store, step, static_cast<uint64_t>(step));
  CHECK(set_checkpoints_aside(store, 3, lock).empty());
  CHECK(set_checkpoints_aside(store, 2, lock) == store + "/previous-1");
  CHECK(list_directory(store) == std::vector<std::string>{"LATEST", "previous-1", "step-1", "step-2"});
  CHECK(read_file(store + "/LATEST", 100) == "step-2\n");
  CHECK(find_resume(store).warnings.empty());
  CHECK(set_checkpoints_aside(store, -1, lock) == store + "/previous-2");
  CHECK(list_directory(store) == std::vector<std::string>{"previous-1", "previous-2"});
  save(store, 3, 9);
  CHECK(apply_retention(store, 1).empty());
  CHECK(clean_store(store, lock).empty());
  CHECK(holds_model(store + "/previous-1/step-3", 3));
  for (uint64_t step : {1, 2}) CHECK(holds_model(store + "/previous-2/step-" + std::to_string(step), step));
}

TEST_CASE("the files of a set are numbered by those ranks that write one") {
  const float value = 1;
  for (const std::vector<int>& writing : {std::vector<int>{0}, {2}, {0, 2}, {0, 1, 2}, {}}) {
    const TemporaryDirectory dir;
    ThreadRanks ranks(3);
    for (const Caught& caught : ranks.run([&](int rank) {
           CheckpointWriter writer(dir.path(), 1, 100, ranks.group(rank));
           std::vector<ShardSpec> shards;
           if (std::find(writing.begin(), writing.end(), rank) != writing.end())
             shards.push_back(ShardSpec::whole(std::to_string(rank), DType::f32, {1}));
           writer.add_tensor_set("optimizer", shards, [&](SafetensorsWriter& w) {
             w.write(std::to_string(rank), &value, sizeof value);
           });
           writer.commit(JsonValue::object());
         }))
      CHECK(caught.text.empty());
    std::vector<std::string> wanted;
    for (const int rank : writing)
      if (rank > 0) wanted.push_back(rank_manifest_name(rank));
    wanted.push_back("manifest.json");
    for (size_t i = 1; i <= writing.size(); ++i)
      wanted.push_back(fmt::format("optimizer-{:05}-of-{:05}.safetensors", i, writing.size()));
    CHECK(list_directory(dir / "step-1") == wanted);
  }
}

TEST_CASE("cleaning removes only leftovers of crashed runs") {
  const TemporaryDirectory dir;
  save(dir / "c", 1, 1);
  const std::string nonce = random_nonce();
  for (const std::string& name : {"step-2.tmp-" + nonce, ".trash-" + nonce, std::string("step-3.tmp-mine"),
                                  std::string("notes.tmp-") + nonce, std::string(".trash-x")}) {
    make_directories(dir / ("c/" + name + "/sub"));
  }
  overwrite(dir / ("c/LATEST.tmp-" + nonce), "step-1");
  const RunLock lock(dir.path());
  CHECK(clean_store(dir / "c", lock) ==
        std::vector<std::string>{".trash-" + nonce, "LATEST.tmp-" + nonce, "step-2.tmp-" + nonce});
  CHECK(list_directory(dir / "c") ==
        std::vector<std::string>{".trash-x", "LATEST", "notes.tmp-" + nonce, "step-1", "step-3.tmp-mine"});
}

TEST_CASE("manifest: mutated text is read or refused") {
  const TemporaryDirectory dir;
  const std::string text = read_file(save(dir.path(), 3, 1) + "/manifest.json", 1 << 20);
  const std::string path = dir / "step-3";
  const size_t tail = std::string("\"crc32c\":\"00000000\"}\n").size();
  const std::string body = text.substr(0, text.size() - tail);
  int accepted = 0;
  for (int i = 0; i < fuzz_iterations() / 4; ++i) {
    // With the right checksum, so that the mutation gets past the first check.
    const std::string bad = mutated(body, static_cast<uint64_t>(i), 4);
    const std::string whole = bad + fmt::format("\"crc32c\":\"{:08x}\"}}\n", crc32c(bad.data(), bad.size()));
    const auto caught = error_of([&] {
      const auto m = CheckpointManifest::from_text(whole, "m");
      REQUIRE(CheckpointManifest::from_text(m.to_text(), "m").to_text() == m.to_text());
      for (const auto& [name, tensor] : m.tensors) tensor_pieces(name, tensor);
      ++accepted;
    });
    REQUIRE((caught.code == 0 || caught.code == 65));
    if (caught.code == 0 && i % 8 == 0) {
      overwrite(path + "/manifest.json", whole);
      const int code = error_of([&] { holds_model(path, 1); }).code;
      REQUIRE((code == 0 || code == 65));
    }
    REQUIRE(error_of([&] {
              CheckpointManifest::from_text(mutated(text, static_cast<uint64_t>(i), 5), "m");
            }).code != 70);
  }
  CHECK(accepted > 0);
}

TEST_CASE("every defect of a checkpoint is reported with its directory and file") {
  const TemporaryDirectory dir;
  const std::string path = save(dir.path(), 40, 1);
  const std::string manifest = path + "/manifest.json", text = read_file(manifest, 1 << 20);
  const auto problems_with = [&](const std::string& content) {
    overwrite(manifest, content);
    const std::vector<std::string> problems = validate_checkpoint(path, Validation::full);
    overwrite(manifest, text);
    return problems;
  };
  // A manifest with a good checksum.
  const auto edited = [&](const std::function<void(CheckpointManifest&)>& edit) {
    CheckpointManifest m = CheckpointManifest::from_text(text, manifest);
    edit(m);
    return m.to_text();
  };
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string body = text.substr(0, text.rfind("\"crc32c\":\""));
    const size_t at = body.find(from);
    REQUIRE(at != std::string::npos);
    body.replace(at, from.size(), to);
    return body + fmt::format("\"crc32c\":\"{:08x}\"}}\n", crc32c(body.data(), body.size()));
  };
  const auto shard = [](CheckpointManifest& m, const char* name) -> CheckpointShard& {
    return m.tensors.at(name).shards.at(0);
  };
  struct Case {
    std::string manifest;
    const char* file;
    const char* what;
  };
  const Case cases[] = {
      {"", "manifest.json", "truncated or damaged"},
      {"{}", "manifest.json", "truncated or damaged"},
      {replaced("\"step\":40", "\"step\":"), "manifest.json:2:", ""},
      {replaced("\"step\":40", "\"step\":-1"), "manifest.json:2:", "negative step"},
      {replaced("\"step\":40", "\"step\":41"), "manifest.json", "is of step 41"},
      {replaced("\"files\"", "\"fils\""), "manifest.json", "\"files\" is missing"},
      {replaced("\"shape\":[7,5]", "\"shape\":[7,6]"), "manifest.json",
       "tensor \"w\": elements [35, 42) are stored nowhere"},
      {replaced("\"shape\":[7,5]", "\"shape\":[-7,5]"), "manifest.json:", "impossible shape"},
      {replaced("\"shape\":[7,5]", "\"shape\":[4294967296,4294967296]"),
       "manifest.json:", "impossible shape"},
      {edited([&](auto& m) { shard(m, "w").offset = 1; }), "manifest.json", "lies outside of it"},
      {edited([&](auto& m) { shard(m, "w").offset = -1; }), "manifest.json", "lies outside of it"},
      {edited([&](auto& m) { shard(m, "columns").stride = 3; }), "manifest.json", "lies outside of it"},
      {edited([&](auto& m) { m.tensors["w"].shards.push_back(shard(m, "w")); }), "manifest.json",
       "tensor \"w\": elements [0, 35) are stored twice"},
      {edited([&](auto& m) { m.tensors["w"].shards.clear(); }), "manifest.json",
       "tensor \"w\": elements [0, 35) are stored nowhere"},
      {edited([&](auto& m) { shard(m, "w").file = "gone.safetensors"; }),
       "manifest.json:", "lies in gone.safetensors, which is not a file of this checkpoint"},
      {edited([&](auto& m) { shard(m, "w").file = "../w.safetensors"; }),
       "manifest.json:", "not a plain file name"},
      {edited([&](auto& m) { shard(m, "w").count = 1 << 10; }), "manifest.json:", "cannot lie in"},
      {edited([&](auto& m) {
         m.files.push_back({"gone.safetensors", 10, 0});
       }),
       "gone.safetensors", "missing"},
      {edited([&](auto& m) { m.files.push_back(m.files[0]); }), "manifest.json", "occurs twice"},
      {edited([&](auto& m) { shard(m, "w").key = "v"; }), "model.safetensors", "damaged: "},
  };
  for (const Case& c : cases) {
    const auto problems = problems_with(c.manifest);
    CAPTURE(c.file, c.what, problems);
    REQUIRE_FALSE(problems.empty());
    for (const std::string& p : problems) CHECK(p.starts_with(path + "/"));
    CHECK(contains(problems[0], "step-40/" + std::string(c.file)));
    CHECK(contains(problems[0], c.what));
  }
}

namespace {

uint64_t bytes_of(const std::string& path) {
  uint64_t sum = 0;
  for (const std::string& name : list_directory(path))
    sum += std::filesystem::file_size(join_path(path, name));
  return sum;
}

// Bytes that this process has read so far.
uint64_t bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string key;
  uint64_t value = 0;
  while (io >> key >> value)
    if (key == "rchar:") return value;
  FAIL("/proc/self/io has no rchar");
  return 0;
}

size_t open_files() {
  return list_directory("/proc/self/fd").size() - 1;  // without that of the directory itself
}

// How often number `i` was verified by the ranks together.
void expect_each_once(const std::string& path, int parts) {
  const CheckpointReader reader(path);
  const CheckpointManifest& manifest = reader.manifest();
  CheckpointSums sums(manifest);
  std::map<int, CheckpointManifest> of_ranks;
  const auto describe = [&](const CheckpointFile& file) {
    const std::string name = rank_manifest_name(file.rank);
    const auto [of_rank, added] =
        of_ranks.emplace(file.rank, CheckpointManifest::from_text(reader.read_text(name), name));
    CHECK(added);
    sums.add(of_rank->second, file.rank);
  };
  std::vector<uint8_t> times(sums.count());
  std::vector<uint64_t> bytes(static_cast<size_t>(parts));
  for (int part = 0; part < parts; ++part)
    sums.for_part(std::vector<uint8_t>(sums.count()), part, parts, describe,
                  [&](size_t i, const CheckpointSums::Sum& sum) {
                    ++times[i];
                    bytes[part] += sum.bytes;
                  });
  CHECK(std::all_of(times.begin(), times.end(), [](uint8_t n) { return n == 1; }));
  uint64_t total = 0;
  for (const uint64_t b : bytes) total += b;
  uint64_t wanted = 0;
  for (const CheckpointFile& f : manifest.files) wanted += f.bytes;
  CHECK(total == wanted);
  for (const uint64_t b : bytes) CHECK(b < wanted / static_cast<uint64_t>(parts) + (2 << 20));
}

}  // namespace

TEST_CASE("a checkpoint of many files is read with few of them open") {
  const TemporaryDirectory dir;
  const std::string path = save_by_ranks(dir / "c", 8);
  REQUIRE(list_directory(path).size() == 18);
  struct rlimit before;
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  struct rlimit few = before;
  few.rlim_cur = open_files() + 4;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  bool same = false;
  size_t open = 0;
  const Caught caught = error_of([&] {
    CheckpointReader reader(path);
    for (const TensorSpec& t : model_tensors()) {
      std::string all(static_cast<size_t>(*checked_product(t.shape) * size_of(t.dtype)), '\0');
      reader.read_logical(t.name, all.data(), all.size());
    }
    open = open_files();
    same = holds_model(path, 3) && reader.verify_rest(0, 1).empty() &&
           validate_checkpoint(path, Validation::full).empty();
  });
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(caught.text == "");
  CHECK(same);
  CHECK(open <= few.rlim_cur);
  // With the usual limit no more than 64 of 100.
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  const size_t others = open_files();
  for (int i = 0; i < 100; ++i) {
    const std::string name = dir / fmt::format("f{}", i);
    SafetensorsWriter writer(name, {{"x", DType::i64, {1}}});
    const int64_t value = i;
    writer.write("x", &value, 8);
    writer.finish();
    files.push_back(std::make_unique<SafetensorsFile>(name));
    CHECK(open_files() <= others + 64);
  }
  for (int i = 0; i < 100; ++i) {
    int64_t value = -1;
    const SafetensorsFile& file = *files[i];
    file.read(file.at("x"), &value, 8);
    CHECK(value == i);
  }
  CHECK(open_files() <= others + 64);
  overwrite(dir / "f0", std::string(80, 'x'));
  int64_t value = 0;
  CHECK(contains(error_of([&] { files[0]->read(files[0]->at("x"), &value, 8); }).text, "was replaced"));
  files.clear();
  CHECK(open_files() == others);
}

TEST_CASE("loading reads and verifies every byte once, and the ranks share what nobody loads") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  constexpr int64_t big = 3'000'001;  // f32: 12 MB
  const std::string path = save_by_ranks(dir / "c", 3, big);
  const uint64_t size = bytes_of(path);
  for (const int parts : {1, 2, 5}) expect_each_once(path, parts);

  uint64_t before = bytes_read();
  CheckpointReader reader(path);
  for (const TensorSpec& t : model_tensors(big)) {
    std::string all(static_cast<size_t>(*checked_product(t.shape) * size_of(t.dtype)), '\0');
    reader.read_logical(t.name, all.data(), all.size());
  }
  CHECK(reader.verify_rest(0, 1).empty());
  CHECK(bytes_read() - before < size + size / 10);

  // Two ranks that load nothing of it: half each.
  for (const int part : {0, 1}) {
    before = bytes_read();
    CHECK(CheckpointReader(path).verify_rest(part, 2).empty());
    CHECK(bytes_read() - before < size / 2 + (3 << 20));
  }
  // Damage is found by one of them.
  const std::string file = path + "/optimizer-00003-of-00003.safetensors";
  std::string bytes = read_file(file, 1 << 24);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  overwrite(file, bytes);
  size_t found = 0;
  for (const int part : {0, 1, 2}) {
    const std::vector<std::string> problems = CheckpointReader(path).verify_rest(part, 3);
    found += problems.size();
    for (const std::string& p : problems) CHECK(contains(p, file + ": damaged: tensor \"big\", bytes"));
  }
  CHECK(found == 1);
  bool damage = false;
  try {
    holds_model(path, 3, big);
  } catch (const CheckpointDamage& e) {
    damage = contains(e.what(), file + ": damaged: tensor \"big\", bytes");
  }
  CHECK(damage);
}
