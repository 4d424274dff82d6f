// The operators torch.ops.ds_sparse_ring_cpu.forward and .backward: tensors in, pointers out, and the choice of the kernel.
//
// TORCH_LIBRARY instead of pybind11: a tenth of the compile time. The JIT imports the library as a Python module, hence the stub.

#include <Python.h>
#include <omp.h>
#include <torch/library.h>

#include <string>

#include "problem.h"

namespace {

using at::Tensor;
using namespace ds_sparse_ring;

enum class Isa { kBaseline, kAvx2, kAvx512 };

Isa best_isa() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
  return Isa::kBaseline;
}

Isa parse_isa(const std::string& name) {
  const Isa best = best_isa();
  if (name.empty()) return best;
  const Isa wanted = name == "avx512" ? Isa::kAvx512 : name == "avx2" ? Isa::kAvx2 : Isa::kBaseline;
  TORCH_CHECK(name == "avx512" || name == "avx2" || name == "baseline", "instruction set must be avx512, avx2 or baseline");
  TORCH_CHECK(wanted <= best, "this CPU has no ", name);
  return wanted;
}

std::string best_isa_name() {
  const Isa best = best_isa();
  return best == Isa::kAvx512 ? "avx512" : best == Isa::kAvx2 ? "avx2" : "baseline";
}

const float* floats(const Tensor& x, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kFloat && x.is_contiguous(), name,
              " must be a contiguous float32 tensor on the CPU");
  return x.const_data_ptr<float>();
}

float* floats_out(const Tensor& x, const char* name) {
  floats(x, name);
  return x.mutable_data_ptr<float>();
}

const int64_t* integers(const Tensor& x, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kLong && x.is_contiguous(), name,
              " must be a contiguous int64 tensor on the CPU");
  return x.const_data_ptr<int64_t>();
}

// maps: q_stride, q_start, k_stride, k_start. shape: index kind, patterns, heads_per_pattern, blocks.
// index: segments [S, 4], then per kind diagonal_ptr, diagonals, column_ptr, columns, or block_ptr, block_values, or nothing.
Problem make_problem(const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef maps, at::IntArrayRef shape,
                     at::TensorList index, double scale, const std::optional<Tensor>& column_k,
                     const std::optional<Tensor>& column_v) {
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.sizes() == k.sizes(), "q, k, v must be [heads, tokens, head size]");
  TORCH_CHECK(q.size(2) == k.size(2) && q.size(2) % 16 == 0, "the head size must be a multiple of 16");
  TORCH_CHECK(q.size(1) % kBlock == 0 && k.size(1) % kBlock == 0, "tokens must be a multiple of ", kBlock);
  TORCH_CHECK(k.size(0) > 0 && q.size(0) % k.size(0) == 0, "query heads must be a multiple of key/value heads");
  TORCH_CHECK(scale > 0, "the scale must be positive");
  TORCH_CHECK(maps.size() == 4 && shape.size() == 4 && !index.empty() && maps[0] > 0 && maps[2] > 0, "bad block maps");
  Problem p{};
  p.heads = q.size(0), p.kv_heads = k.size(0), p.head_size = q.size(2);
  p.q_blocks = q.size(1) / kBlock, p.k_blocks = k.size(1) / kBlock;
  p.q_stride = maps[0], p.q_start = maps[1], p.k_stride = maps[2], p.k_start = maps[3];
  p.scale = static_cast<float>(scale);
  p.q = floats(q, "q"), p.k = floats(k, "k"), p.v = floats(v, "v");
  Index& x = p.index;
  x.kind = static_cast<IndexKind>(shape[0]);
  x.patterns = shape[1], x.heads_per_pattern = shape[2], x.blocks = shape[3];
  TORCH_CHECK(x.patterns * x.heads_per_pattern == p.heads, "the index has patterns for another number of heads");
  x.segments = index[0].size(0);
  static_assert(sizeof(Segment) == 4 * sizeof(int64_t));
  x.segment = reinterpret_cast<const Segment*>(integers(index[0], "segments"));
  const int64_t last = p.q_stride * (p.q_blocks - 1) + p.q_start;
  TORCH_CHECK(p.q_start >= 0 && x.segments > 0 && x.segment[x.segments - 1].end > last, "queries lie outside of the segments");
  if (x.kind == IndexKind::kVerticalSlash) {
    TORCH_CHECK(index.size() == 5 && index[1].numel() == x.segments * x.patterns + 1, "bad vertical-slash index");
    x.diagonal_ptr = integers(index[1], "diagonal_ptr"), x.diagonals = integers(index[2], "diagonals");
    x.column_ptr = integers(index[3], "column_ptr"), x.columns = integers(index[4], "columns");
  } else if (x.kind == IndexKind::kBlockLists) {
    TORCH_CHECK(index.size() == 3 && index[1].numel() == x.patterns * x.blocks + 1, "bad block lists");
    x.block_ptr = integers(index[1], "block_ptr"), x.block_values = integers(index[2], "block_values");
  }
  if (column_k.has_value()) {
    TORCH_CHECK(x.kind == IndexKind::kVerticalSlash && column_k->size(0) == index[4].numel(), "columns without an index");
    p.column_k = floats(*column_k, "column_k"), p.column_v = floats(*column_v, "column_v");
  }
  return p;
}

void forward(const Tensor& q, const Tensor& k, const Tensor& v, at::IntArrayRef maps, at::IntArrayRef shape,
             at::TensorList index, double scale, const std::optional<Tensor>& column_k, const std::optional<Tensor>& column_v,
             Tensor o, Tensor lse, c10::string_view isa) {
  const Problem p = make_problem(q, k, v, maps, shape, index, scale, column_k, column_v);
  const ForwardOutput out{floats_out(o, "o"), floats_out(lse, "lse")};
  const Isa chosen = parse_isa(std::string(isa));
  const auto run = chosen == Isa::kAvx512 ? avx512::forward : chosen == Isa::kAvx2 ? avx2::forward : baseline::forward;
  run(p, out, omp_get_max_threads());
}

void backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& d_o, const Tensor& lse, const Tensor& delta,
              at::IntArrayRef maps, at::IntArrayRef shape, at::TensorList index, double scale,
              const std::optional<Tensor>& column_k, const std::optional<Tensor>& column_v, Tensor dq, Tensor dk, Tensor dv,
              const std::optional<Tensor>& d_column_k, const std::optional<Tensor>& d_column_v, c10::string_view isa) {
  const Problem p = make_problem(q, k, v, maps, shape, index, scale, column_k, column_v);
  const BackwardInput in{floats(d_o, "do"), floats(lse, "lse"), floats(delta, "delta")};
  BackwardOutput out{floats_out(dq, "dq"), floats_out(dk, "dk"), floats_out(dv, "dv"), nullptr, nullptr};
  if (column_k.has_value())
    out.d_column_k = floats_out(*d_column_k, "d_column_k"), out.d_column_v = floats_out(*d_column_v, "d_column_v");
  const Isa chosen = parse_isa(std::string(isa));
  const auto run = chosen == Isa::kAvx512 ? avx512::backward : chosen == Isa::kAvx2 ? avx2::backward : baseline::backward;
  run(p, in, out, omp_get_max_threads());
}

}  // namespace

TORCH_LIBRARY(ds_sparse_ring_cpu, m) {
  m.def("forward(Tensor q, Tensor k, Tensor v, int[] maps, int[] shape, Tensor[] index, float scale, Tensor? column_k, "
        "Tensor? column_v, Tensor(a!) o, Tensor(b!) lse, str isa=\"\") -> ()", forward);
  m.def("backward(Tensor q, Tensor k, Tensor v, Tensor d_o, Tensor lse, Tensor delta, int[] maps, int[] shape, Tensor[] index, "
        "float scale, Tensor? column_k, Tensor? column_v, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? d_column_k, "
        "Tensor(e!)? d_column_v, str isa=\"\") -> ()", backward);
  m.def("best_isa() -> str", best_isa_name);
}

#define DSR_INIT(name) PyInit_##name
#define DSR_PYINIT(name) DSR_INIT(name)
PyMODINIT_FUNC DSR_PYINIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "ds_sparse_ring_cpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
