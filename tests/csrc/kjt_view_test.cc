// Lengths and offsets become starts, and every way to be wrong is found at its place.
#include "trtpu/kjt_view.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"

namespace trtpu {
namespace {

struct Found {
  KjtProblem problem;
  std::vector<std::int32_t> starts;
};

template <class Int>
Found Find(std::vector<Int> array, bool is_offsets, std::int64_t num_keys,
           std::int64_t num_values) {
  const std::int64_t bags = static_cast<std::int64_t>(array.size()) - is_offsets;
  KjtView kjt;
  kjt.values = {.data = &kjt, .size = num_values, .is_64bit = true};  // not read
  const IntArray ints = {array.data(), static_cast<std::int64_t>(array.size()), sizeof(Int) == 8};
  (is_offsets ? kjt.offsets : kjt.lengths) = ints;
  kjt.num_keys = num_keys;
  kjt.batch_size = num_keys == 0 ? 0 : bags / num_keys;
  ThreadPool pool(2);
  std::vector<std::int64_t> scratch(static_cast<std::size_t>(num_keys));
  Found found{{}, std::vector<std::int32_t>(static_cast<std::size_t>(bags + 1))};
  found.problem = FindStarts(kjt, pool, scratch.data(), found.starts.data());
  return found;
}

bool IsProblem(const Found& found, KjtProblem::Kind kind, std::int64_t position,
               std::int64_t value) {
  return found.problem.kind == kind && found.problem.position == position &&
         found.problem.value == value;
}

template <class Int>
void TestBothWidths() {
  const std::vector<std::int32_t> starts = {0, 2, 2, 5, 6};
  Found found = Find<Int>({2, 0, 3, 1}, false, 2, 6);
  CHECK(found.problem.kind == KjtProblem::kNone && found.starts == starts);
  found = Find<Int>({0, 2, 2, 5, 6}, true, 2, 6);
  CHECK(found.problem.kind == KjtProblem::kNone && found.starts == starts);

  CHECK(IsProblem(Find<Int>({2, 0, -3, 1}, false, 2, 6), KjtProblem::kLength, 2, -3));
  CHECK(IsProblem(Find<Int>({-1, 0, -3, 1}, false, 2, 6), KjtProblem::kLength, 0, -1));
  CHECK(IsProblem(Find<Int>({2, 7, 3, 1}, false, 2, 6), KjtProblem::kLength, 1, 7));
  CHECK(IsProblem(Find<Int>({2, 0, 3, 2}, false, 2, 6), KjtProblem::kTotal, 4, 7));
  CHECK(IsProblem(Find<Int>({2, 0, 0, 2}, false, 2, 6), KjtProblem::kTotal, 4, 4));
  CHECK(IsProblem(Find<Int>({1, 2, 2, 5, 6}, true, 2, 6), KjtProblem::kOffset, 0, 1));
  CHECK(IsProblem(Find<Int>({0, 2, 1, 5, 6}, true, 2, 6), KjtProblem::kOffset, 2, 1));
  CHECK(IsProblem(Find<Int>({0, 2, 2, 1, 6}, true, 2, 6), KjtProblem::kOffset, 3, 1));
  CHECK(IsProblem(Find<Int>({0, 2, 2, 7, 6}, true, 2, 6), KjtProblem::kOffset, 3, 7));
  CHECK(IsProblem(Find<Int>({0, 2, 2, 5, 5}, true, 2, 6), KjtProblem::kTotal, 4, 5));

  // Nothing at all.
  CHECK(Find<Int>({}, false, 0, 0).problem.kind == KjtProblem::kNone);
  CHECK(Find<Int>({0}, true, 3, 0).problem.kind == KjtProblem::kNone);
  CHECK(IsProblem(Find<Int>({}, false, 0, 1), KjtProblem::kTotal, 0, 0));
}

}  // namespace
}  // namespace trtpu

int main() {
  trtpu::TestBothWidths<std::int32_t>();
  trtpu::TestBothWidths<std::int64_t>();
  // Sums that would wrap around to the right total.
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  CHECK(trtpu::IsProblem(trtpu::Find<std::int64_t>({kHuge, kHuge, 4, 4}, false, 2, 6),
                         trtpu::KjtProblem::kLength, 0, kHuge));
}
