// Embedding lookup and fused optimizer update on the CPU, straight from SparseCore buffers.
//
// Tables and optimizer slots are logical and row-major: (num_embeddings, dim). The buffers name
// rows as (partition p, local row l); p holds every P-th row, or one block of block_rows rows, so
// its rows are an affine walk:
//   id = (l - row_offset) * P + (p - rotation) mod P, or
//   id = (l - row_offset) + ((p - rotation) mod P) * block_rows.
// Results do not depend on the number of threads or on the instruction set.
#ifndef TRTPU_ROW_OPS_H_
#define TRTPU_ROW_OPS_H_

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trtpu/thread_pool.h"

namespace trtpu {

struct RowKernels;
struct SampleRange;

struct TableGeometry {
  std::int64_t stack, num_embeddings, dim, row_offset, rotation, first_feature, num_features;
  std::int64_t block_rows;  // rows of a partition's block; 0: every P-th row
};

// Sample i is row sample_offset + i % samples_per_core of core i / samples_per_core; its vector in
// the output and in the gradient starts at float out_offset + i * out_stride.
struct FeatureGeometry {
  std::int64_t sample_offset, samples_per_core, num_samples, out_offset, out_stride;
};

// Shapes and places of one batch; tables and features in stack order. A lookup has all tables of a
// stack or none, an update may leave out any.
struct Geometry {
  std::int64_t num_cores = 0;        // P
  std::int64_t num_local_cores = 0;  // C
  std::int64_t num_stacks = 0;
  std::vector<TableGeometry> tables;
  std::vector<FeatureGeometry> features;

  // From the flat integers of sparsecore/geometry.py. Returns what is wrong with them, "" if
  // nothing.
  [[nodiscard]] std::string Decode(std::span<const std::int64_t> ints);
};

// One stack's packed ids: core c owns row pointers [c * max(P, 8), ...) and slots [c * N / C, ...).
struct PackedStack {
  std::span<const std::int32_t> row_pointers;   // (C * max(P, 8))
  std::span<const std::int32_t> embedding_ids;  // (N)
  std::span<const std::int32_t> sample_ids;     // (N)
  std::span<const float> gains;                 // (N)
};

// One table's weights, (num_embeddings, dim) of float32, or of float16: these are converted when
// loaded, computed with in float32, and rounded to nearest even when stored.
struct ConstWeights {
  const void* data = nullptr;
  bool is_half = false;
};
struct Weights {
  void* data = nullptr;
  bool is_half = false;
};

// One table's weights and optimizer state.
struct TableState {
  Weights weights;
  std::vector<float*> row_slots;     // each (num_embeddings, dim)
  std::vector<float*> scalar_slots;  // each (num_embeddings)
};

// Number of state arrays and operands that a rule needs.
struct RuleShape {
  int num_row_slots;
  int num_scalar_slots;
  int num_operands;
};
[[nodiscard]] std::optional<RuleShape> FindRule(std::string_view rule);
[[nodiscard]] std::vector<std::string_view> RuleNames();

// Instruction sets that this machine runs, the widest first; that one is used unless another is
// set.
[[nodiscard]] std::vector<std::string_view> InstructionSets();
[[nodiscard]] std::string_view InstructionSet();
[[nodiscard]] bool SetInstructionSet(std::string_view name);  // false: not one of InstructionSets

// Runs the two operations on a pool's threads and keeps scratch between calls; calls from several
// threads take turns. Both return "" or what is wrong with the buffers; an update then has changed
// nothing, a lookup has written nothing. The caller vouches for the sizes of tables and slots.
class RowOps {
 public:
  explicit RowOps(ThreadPool& pool);
  ~RowOps();

  // Writes the vectors of all samples: sums of gain * row in (partition, row) order; zeros for a
  // sample without ids.
  [[nodiscard]] std::string Lookup(const Geometry& geometry, std::span<const PackedStack> stacks,
                                   std::span<const ConstWeights> tables, std::span<float> out);

  // One optimizer step for every row that the buffers name. Its gradient is the sum of gain *
  // gradient over (source core, sample), each element of the gradient first clipped to
  // [-max_gradient, max_gradient] when max_gradient > 0. `operands` is (tables, num_operands).
  [[nodiscard]] std::string Update(const Geometry& geometry, std::span<const PackedStack> stacks,
                                   std::span<const TableState> tables, std::span<const float> grad,
                                   std::span<const float> operands, std::string_view rule,
                                   float max_gradient);

 private:
  struct Scratch;

  ThreadPool& pool_;
  std::mutex mutex_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace trtpu

#endif  // TRTPU_ROW_OPS_H_
