// Layouts that contradict themselves are named; the key map is exact for any number of cores.
#include "trtpu/layout.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "check.h"

namespace trtpu {
namespace {

Layout Good() {
  Layout layout;
  layout.tables = {{.stack = 0,
                    .num_embeddings = 100,
                    .row_offset = 0,
                    .rotation = 0,
                    .first_feature = 0,
                    .num_features = 1},
                   {.stack = 0,
                    .num_embeddings = 50,
                    .row_offset = 32,
                    .rotation = 2,
                    .first_feature = 1,
                    .num_features = 2}};
  layout.combiners = {Combiner::kSum, Combiner::kMean, Combiner::kNone};
  layout.num_stacks = 1;
  layout.num_cores = 4;
  layout.num_local_cores = 2;
  return layout;
}

template <class Change>
bool Complains(Change change, const std::string& about) {
  Layout layout = Good();
  change(layout);
  return CheckLayout(layout).find(about) != std::string::npos;
}

void TestCheckLayout() {
  CHECK(CheckLayout(Good()).empty());
  CHECK(Complains([](Layout& l) { l.tables[1].stack = 1; }, "table 1: stack 1"));
  CHECK(Complains([](Layout& l) { l.tables[0].stack = -1; }, "table 0: stack -1"));
  CHECK(Complains([](Layout& l) { l.tables[0].num_embeddings = 0; }, "num_embeddings=0"));
  CHECK(Complains([](Layout& l) { l.tables[1].rotation = 4; }, "rotation=4"));
  CHECK(Complains([](Layout& l) { l.tables[1].rotation = -1; }, "rotation=-1"));
  CHECK(Complains([](Layout& l) { l.tables[1].block_rows = 12; }, "block_rows=12 does not spread"));
  CHECK(Complains([](Layout& l) { l.tables[1].block_rows = -1; }, "block_rows=-1"));
  CHECK(Complains([](Layout& l) { l.tables[0].block_rows = 33; }, "overlaps"));
  CHECK(Complains([](Layout& l) { l.tables[0].block_rows = INT64_MAX; }, "overlaps"));
  CHECK(Complains([](Layout& l) { l.tables[1].row_offset = 24; }, "overlaps"));
  CHECK(Complains([](Layout& l) { l.tables[0].row_offset = -1; }, "overlaps"));
  CHECK(Complains([](Layout& l) { l.tables[1].row_offset = 2147483647; }, "does not fit int32"));
  CHECK(Complains([](Layout& l) { l.tables[1].num_embeddings = INT64_MAX; }, "does not fit int32"));
  CHECK(Complains([](Layout& l) { l.tables[1].first_feature = 0; }, "features"));
  CHECK(Complains([](Layout& l) { l.tables[1].num_features = 3; }, "features"));
  CHECK(Complains([](Layout& l) { l.tables[1].num_features = -1; }, "features"));
  CHECK(Complains([](Layout& l) { l.tables[1].num_features = 1; }, "3 combiners"));
  CHECK(Complains([](Layout& l) { l.combiners[0] = static_cast<Combiner>(4); }, "combiner 4"));
  CHECK(Complains([](Layout& l) { l.num_cores = 0; }, "must be positive"));
  CHECK(Complains([](Layout& l) { l.num_local_cores = 5; }, "no more local cores"));
}

void TestBlocks() {
  Layout layout = Good();
  layout.tables[0].block_rows = 32;  // up to the next table
  layout.tables[1].block_rows = 13;
  CHECK(CheckLayout(layout).empty());
  const KeyMap four = MakeKeyMap(layout.tables[1], 4);
  CHECK(four.mapping == RowMapping::kBlocks && four.is_narrow);
  CHECK(four.num_parts == 4 && four.part_bits == 2 && four.row_bits == 4);
  for (int part = 0; part < 4; ++part) CHECK(four.PartitionOf(part) == part);
  layout.tables[1].block_rows = 1'000'000;  // one block, longer than the table
  CHECK(CheckLayout(layout).empty());
  const KeyMap one = MakeKeyMap(layout.tables[1], 4);
  CHECK(one.divisor == 50 && one.row_bits == 6 && one.num_parts == 1 && one.part_bits == 0);
  CHECK(one.PartitionOf(0) == 2);
  layout.tables[1].block_rows = 25;  // two blocks: on cores 3 and 0
  layout.tables[1].rotation = 3;
  const KeyMap two = MakeKeyMap(layout.tables[1], 4);
  CHECK(two.num_parts == 2 && two.rotation == 1);
  CHECK(two.PartitionOf(0) == 0 && two.PartitionOf(1) == 3);
  for (const std::int64_t block : {1ll, 2ll, 3ll, 7ll, 1000ll, 65'536ll, 40'000'000ll, 1ll << 30,
                                   (1ll << 31) - 1, 1ll << 31}) {
    const TableLayout table = {.stack = 0,
                               .num_embeddings = std::int64_t{1} << 31,
                               .row_offset = 0,
                               .rotation = 0,
                               .first_feature = 0,
                               .num_features = 0,
                               .block_rows = block};
    const KeyMap map = MakeKeyMap(table, 2'000'000'000);
    CHECK(map.reciprocal < (std::uint64_t{1} << 32));
    const std::uint64_t step = static_cast<std::uint64_t>(block);
    for (std::uint64_t id = 0; id < (1ull << 31); id += step * (1 + 10'007 / step)) {
      for (const std::uint64_t near : {id - (id > 0), id, id + step - 1}) {
        CHECK(near >= (1ull << 31) || near * map.reciprocal >> map.reciprocal_shift == near / step);
      }
    }
  }
}

void TestReciprocal() {
  for (std::int32_t cores = 1; cores < 3000; cores = cores < 70 ? cores + 1 : cores * 5 / 4) {
    const TableLayout table = {.stack = 0,
                               .num_embeddings = std::int64_t{1} << 31,
                               .row_offset = 0,
                               .rotation = 0,
                               .first_feature = 0,
                               .num_features = 0};
    const KeyMap map = MakeKeyMap(table, cores);
    CHECK(map.reciprocal < (std::uint64_t{1} << 32));
    const auto is_exact = [&](std::uint64_t id) {
      return id * map.reciprocal >> map.reciprocal_shift == id / static_cast<std::uint64_t>(cores);
    };
    const std::uint64_t step = static_cast<std::uint64_t>(cores);
    for (std::uint64_t id = 0; id < (1ull << 31); id += 7919 * step) {
      CHECK(is_exact(id) && is_exact(id + step - 1) && (id == 0 || is_exact(id - 1)));
    }
    CHECK(is_exact((1ull << 31) - 1));
  }
}

}  // namespace
}  // namespace trtpu

int main() {
  trtpu::TestCheckLayout();
  trtpu::TestReciprocal();
  trtpu::TestBlocks();
}
