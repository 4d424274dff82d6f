// Binds the CUDA kernels to torch: checks tensors and hands their addresses on. Nothing here waits for the device.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "backward.cuh"
#include "forward.cuh"
#include "wanted.cuh"

namespace {

using at::Tensor;
using namespace ds_sparse_ring;

constexpr double kLog2e = 1.4426950408889634;

template <class T>
const T* table(const Tensor& x, const char* name, int64_t least) {
  TORCH_CHECK(x.scalar_type() == c10::CppTypeToScalarType<T>::value && x.is_cuda() && x.is_contiguous() && x.numel() >= least, name,
              ": a contiguous tensor of ", c10::CppTypeToScalarType<T>::value, " with ", least,
              " entries on the GPU was expected, got ", x.scalar_type(), " ", x.sizes());
  return x.const_data_ptr<T>();
}

// What the index says about a span of queries and a span of keys: addresses in tables that it keeps alive.
struct HopTables {
  Tables tables{};
  int q_blocks, k_blocks, heads_per_pattern;
  int64_t columns = 0;
  const int32_t *k_segments = nullptr, *column_tile_row = nullptr, *column_tile_begin = nullptr;
  int column_tiles = 0;
  std::vector<Tensor> held;

  // bits: empty for the full index and lists. columns: empty, or ptr, ids, end, bits, and row and begin of tiles of 128 columns.
  // lists: empty, or ptr and values, and those of the transpose.
  HopTables(int base, bool own, int q_stride, int q_start, int q_blocks, int k_blocks, int patterns, int heads_per_pattern,
            const Tensor& segments, const Tensor& q_segment, const Tensor& k_segments_, const std::optional<Tensor>& bits,
            const std::vector<Tensor>& of_columns, const std::vector<Tensor>& lists)
      : q_blocks(q_blocks), k_blocks(k_blocks), heads_per_pattern(heads_per_pattern), held{segments, q_segment, k_segments_} {
    const int64_t rows = segments.size(0) * patterns;
    Tables& t = tables;
    t.full = !bits.has_value() && lists.empty(), t.own = own, t.base = base, t.q_stride = q_stride, t.q_start = q_start, t.patterns = patterns;
    t.segments = table<int32_t>(segments, "segments", 3), t.q_segment = table<int32_t>(q_segment, "q_segment", q_blocks);
    k_segments = table<int32_t>(k_segments_, "k_segments", 2 * int64_t{k_blocks});
    if (bits.has_value()) {
      TORCH_CHECK(bits->dim() == 2, "bits: two dimensions were expected");
      t.bits = table<int32_t>(*bits, "bits", rows * bits->size(1)), t.words = bits->size(1);
      held.push_back(*bits);
    }
    if (!lists.empty()) {
      TORCH_CHECK(lists.size() == 4 && !bits.has_value() && of_columns.empty(), "lists: ptr and values, twice, were expected");
      t.list_ptr = table<int32_t>(lists[0], "list_ptr", int64_t{patterns} * q_blocks + 1);
      t.list_values = table<int32_t>(lists[1], "list_values", 0);
      t.reader_ptr = table<int32_t>(lists[2], "reader_ptr", int64_t{patterns} * k_blocks + 1);
      t.reader_values = table<int32_t>(lists[3], "reader_values", 0);
      held.insert(held.end(), lists.begin(), lists.end());
    }
    if (of_columns.empty()) return;
    TORCH_CHECK(of_columns.size() == 6 && of_columns[3].dim() == 2, "columns: ptr, ids, end, bits and tiles were expected");
    columns = of_columns[1].numel(), t.column_words = of_columns[3].size(1);
    t.column_ptr = table<int64_t>(of_columns[0], "column_ptr", rows + 1);
    t.column_ids = table<int64_t>(of_columns[1], "column_ids", 0);
    t.column_end = table<int32_t>(of_columns[2], "column_end", int64_t{patterns} * q_blocks);
    t.column_bits = table<int32_t>(of_columns[3], "column_bits", rows * t.column_words);
    column_tiles = static_cast<int>(of_columns[4].numel());
    column_tile_row = table<int32_t>(of_columns[4], "column_tile_row", 0);
    column_tile_begin = table<int32_t>(of_columns[5], "column_tile_begin", column_tiles);
    held.insert(held.end(), of_columns.begin(), of_columns.end());
  }
};

// x, or a copy if the copy engine cannot read it: rows contiguous, all else at multiples of 16 bytes
Tensor readable(const Tensor& x) {
  const int64_t unit = 16 / x.element_size();
  bool fits = x.stride(-1) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) fits = fits && (x.size(i) == 1 || (x.stride(i) > 0 && x.stride(i) % unit == 0));
  return fits ? x : x.clone(at::MemoryFormat::Contiguous);
}

// from one head to the next: of a single head anything that the copy engine takes
int64_t head_stride(const Tensor& x) { return x.size(0) == 1 ? x.size(1) * x.stride(1) : x.stride(0); }

void check(const Tensor& x, const char* name, c10::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  TORCH_CHECK(x.sizes() == sizes && x.scalar_type() == dtype && x.device() == device, name, ": ", sizes, " of ", dtype, " on ",
              device, " was expected, got ", x.sizes(), " of ", x.scalar_type(), " on ", x.device());
}

Output output_of(const Tensor& o, bool overwrite) {
  if (!overwrite) return kMergeFloat;
  return o.scalar_type() == at::kFloat ? kWriteFloat : kWriteElement;
}

void forward(const HopTables& index, const Tensor& q_given, const Tensor& k_given, const Tensor& v_given, const Tensor& o,
             const Tensor& lse, const std::optional<Tensor>& column_k_given, const std::optional<Tensor>& column_v_given,
             double scale, bool overwrite, int spare_multiprocessors) {
  const at::Device device = q_given.device();
  TORCH_CHECK(device.is_cuda() && q_given.dim() == 3 && k_given.dim() == 3, "forward: tensors [heads, rows, dims] on a GPU");
  const int64_t heads = q_given.size(0), kv_heads = k_given.size(0), dims = q_given.size(2);
  const int64_t q_rows = int64_t{index.q_blocks} * kBlock, k_rows = int64_t{index.k_blocks} * kBlock;
  const at::ScalarType type = q_given.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kHalf, "forward: bfloat16 or float16 was expected, got ", type);
  TORCH_CHECK((dims == 64 || dims == 128) && heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && q_rows > 0 && k_rows > 0,
              "forward: head size 64 or 128 and heads that share keys evenly were expected, got ", q_given.sizes(), " and ",
              k_given.sizes());
  TORCH_CHECK(index.tables.patterns * index.heads_per_pattern == heads, "forward: the index is for ",
              index.tables.patterns * index.heads_per_pattern, " heads, q has ", heads);
  check(q_given, "q", {heads, q_rows, dims}, type, device);
  check(k_given, "k", {kv_heads, k_rows, dims}, type, device);
  check(v_given, "v", {kv_heads, k_rows, dims}, type, device);
  check(o, "o", {heads, q_rows, dims}, overwrite && o.scalar_type() == type ? type : at::kFloat, device);
  check(lse, "lse", {heads, q_rows}, at::kFloat, device);
  TORCH_CHECK(o.stride(2) == 1 && o.stride(1) % 2 == 0 && (heads == 1 || o.stride(0) % 2 == 0) && lse.stride(1) == 1 &&
                  reinterpret_cast<uintptr_t>(o.const_data_ptr()) % 8 == 0,
              "forward: rows of o and lse must be contiguous");

  const c10::cuda::CUDAGuard guard(device);
  const Tensor q = readable(q_given), k = readable(k_given), v = readable(v_given);
  Tensor column_k, column_v;
  ForwardProblem p{};
  p.q = q.const_data_ptr(), p.k = k.const_data_ptr(), p.v = v.const_data_ptr();
  p.q_head = head_stride(q), p.k_head = head_stride(k), p.v_head = head_stride(v);
  p.q_row = q.stride(1), p.k_row = k.stride(1), p.v_row = v.stride(1);
  p.tables = index.tables;
  if (column_k_given.has_value() && column_v_given.has_value() && index.columns > 0) {
    check(*column_k_given, "column_k", {index.columns, dims}, type, device);
    check(*column_v_given, "column_v", {index.columns, dims}, type, device);
    column_k = readable(*column_k_given), column_v = readable(*column_v_given);
    p.column_k = column_k.const_data_ptr(), p.column_v = column_v.const_data_ptr();
    p.column_k_row = column_k.stride(0), p.column_v_row = column_v.stride(0);
    p.columns = index.columns;
  }
  p.o = o.mutable_data_ptr(), p.lse = lse.mutable_data_ptr<float>();
  p.o_head = o.stride(0), p.o_row = o.stride(1), p.lse_head = lse.stride(0);
  p.element = type == at::kHalf ? kFloat16 : kBfloat16, p.head_size = dims;
  p.heads = heads, p.kv_heads = kv_heads, p.q_blocks = index.q_blocks, p.k_blocks = index.k_blocks;
  p.heads_per_pattern = index.heads_per_pattern;
  p.scale_log2 = static_cast<float>(scale * kLog2e);
  p.heads_together = std::gcd(index.heads_per_pattern, static_cast<int>(heads / kv_heads));
  p.output = output_of(o, overwrite);
  const Tensor next_tile = at::empty({1}, o.options().dtype(at::kInt));
  p.next_tile = next_tile.mutable_data_ptr<int32_t>();
  int multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device.index());
  if (error == cudaSuccess)
    error = launch_forward(p, std::max(multiprocessors - spare_multiprocessors, 1), c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(error == cudaSuccess, "the CUDA forward kernel was refused: ", cudaGetErrorString(error));
}

// rows that are read and written two or four numbers at a time
void check_sums(const Tensor& x, const char* name, c10::IntArrayRef sizes, at::Device device, int64_t unit) {
  check(x, name, sizes, at::kFloat, device);
  bool fits = x.stride(-1) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % (4 * unit) == 0;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) fits = fits && (x.size(i) == 1 || (x.stride(i) > 0 && x.stride(i) % unit == 0));
  TORCH_CHECK(fits, name, ": contiguous rows at multiples of ", unit, " numbers were expected, got strides ", x.strides());
}

void backward(const HopTables& index, const Tensor& q_given, const Tensor& k_given, const Tensor& v_given, const Tensor& do_given,
              const Tensor& lse, const Tensor& delta, const Tensor& dq, const Tensor& dk, const Tensor& dv,
              const std::optional<Tensor>& column_k_given, const std::optional<Tensor>& column_v_given,
              const std::optional<Tensor>& d_column_k, const std::optional<Tensor>& d_column_v, double scale, bool overwrite,
              int first_head, int spare_multiprocessors) {
  const at::Device device = q_given.device();
  TORCH_CHECK(device.is_cuda() && q_given.dim() == 3 && k_given.dim() == 3, "backward: tensors [heads, rows, dims] on a GPU");
  const int64_t heads = q_given.size(0), kv_heads = k_given.size(0), dims = q_given.size(2);
  const int64_t q_rows = int64_t{index.q_blocks} * kBlock, k_rows = int64_t{index.k_blocks} * kBlock;
  const at::ScalarType type = q_given.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kHalf, "backward: bfloat16 or float16 was expected, got ", type);
  TORCH_CHECK((dims == 64 || dims == 128) && heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && q_rows > 0 && k_rows > 0,
              "backward: head size 64 or 128 and heads that share keys evenly were expected, got ", q_given.sizes(), " and ",
              k_given.sizes());
  TORCH_CHECK(scale > 0, "backward: a positive softmax scale was expected, got ", scale);
  TORCH_CHECK(index.tables.patterns * index.heads_per_pattern == heads, "backward: the index is for ",
              index.tables.patterns * index.heads_per_pattern, " heads, q has ", heads);
  check(q_given, "q", {heads, q_rows, dims}, type, device);
  check(do_given, "do", {heads, q_rows, dims}, type, device);
  check(k_given, "k", {kv_heads, k_rows, dims}, type, device);
  check(v_given, "v", {kv_heads, k_rows, dims}, type, device);
  check_sums(lse, "lse", {heads, q_rows}, device, 4);
  check_sums(delta, "delta", {heads, q_rows}, device, 4);
  const int64_t group = heads / kv_heads, of_call = dq.dim() == 3 ? dq.size(0) : 0;
  TORCH_CHECK(of_call > 0 && of_call % group == 0 && first_head >= 0 && first_head % group == 0 && first_head + of_call <= heads,
              "backward: dq is for heads of whole key/value heads, got ", dq.sizes(), " from head ", first_head, " of ", heads);
  check_sums(dq, "dq", {of_call, q_rows, dims}, device, 4);
  check_sums(dk, "dk", {kv_heads, k_rows, dims}, device, 2);
  check_sums(dv, "dv", {kv_heads, k_rows, dims}, device, 2);

  const c10::cuda::CUDAGuard guard(device);
  const Tensor q = readable(q_given), k = readable(k_given), v = readable(v_given), d_o = readable(do_given);
  Tensor column_k, column_v;
  BackwardProblem p{};
  p.q = q.const_data_ptr(), p.k = k.const_data_ptr(), p.v = v.const_data_ptr(), p.d_o = d_o.const_data_ptr();
  p.q_head = head_stride(q), p.k_head = head_stride(k), p.v_head = head_stride(v), p.do_head = head_stride(d_o);
  p.q_row = q.stride(1), p.k_row = k.stride(1), p.v_row = v.stride(1), p.do_row = d_o.stride(1);
  p.lse = lse.const_data_ptr<float>(), p.delta = delta.const_data_ptr<float>();
  p.lse_head = lse.stride(0), p.delta_head = delta.stride(0);
  p.dq = dq.mutable_data_ptr<float>(), p.dk = dk.mutable_data_ptr<float>(), p.dv = dv.mutable_data_ptr<float>();
  p.dq_head = head_stride(dq), p.dk_head = dk.stride(0), p.dv_head = dv.stride(0);
  p.dq_row = dq.stride(1), p.dk_row = dk.stride(1), p.dv_row = dv.stride(1);
  p.tables = index.tables, p.k_segments = index.k_segments;
  if (column_k_given.has_value() && column_v_given.has_value() && d_column_k.has_value() && d_column_v.has_value() &&
      index.columns > 0) {
    check(*column_k_given, "column_k", {index.columns, dims}, type, device);
    check(*column_v_given, "column_v", {index.columns, dims}, type, device);
    check(*d_column_k, "d_column_k", {index.columns, dims}, at::kFloat, device);
    check(*d_column_v, "d_column_v", {index.columns, dims}, at::kFloat, device);
    TORCH_CHECK(d_column_k->is_contiguous() && d_column_v->is_contiguous(), "d_columns: contiguous tensors were expected");
    column_k = readable(*column_k_given), column_v = readable(*column_v_given);
    p.column_k = column_k.const_data_ptr(), p.column_v = column_v.const_data_ptr();
    p.column_k_row = column_k.stride(0), p.column_v_row = column_v.stride(0);
    p.d_column_k = d_column_k->mutable_data_ptr<float>(), p.d_column_v = d_column_v->mutable_data_ptr<float>();
    p.columns = index.columns, p.column_tiles = index.column_tiles;
    p.column_tile_row = index.column_tile_row, p.column_tile_begin = index.column_tile_begin;
  }
  p.element = type == at::kHalf ? kFloat16 : kBfloat16, p.head_size = dims;
  p.heads = heads, p.kv_heads = kv_heads, p.q_blocks = index.q_blocks, p.k_blocks = index.k_blocks;
  p.heads_per_pattern = index.heads_per_pattern, p.first_head = first_head, p.last_head = first_head + of_call;
  p.scale = static_cast<float>(scale), p.scale_log2 = static_cast<float>(scale * kLog2e);
  p.log2_scale = static_cast<float>(std::log2(scale));
  p.overwrite_dq = overwrite;
  const Tensor next_tile = at::empty({kCounters}, dq.options().dtype(at::kInt));
  p.next_tile = next_tile.mutable_data_ptr<int32_t>();
  int multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device.index());
  if (error == cudaSuccess)
    error = launch_backward(p, std::max(multiprocessors - spare_multiprocessors, 1), c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(error == cudaSuccess, "the CUDA backward kernel was refused: ", cudaGetErrorString(error));
}

// sets bits in `words`; rows: block, first, valid, slot and reach of LocalRows
void mark_wanted(const Tensor& words, const Tensor& q_given, const Tensor& k_given, const std::vector<Tensor>& rows,
                 int64_t patterns, int64_t window, double scale, double price) {
  const at::Device device = q_given.device();
  TORCH_CHECK(device.is_cuda() && q_given.dim() == 3 && k_given.dim() == 3, "mark_wanted: tensors [heads, rows, dims] on a GPU");
  const int64_t heads = q_given.size(0), kv_heads = k_given.size(0), dims = q_given.size(2), tokens = k_given.size(1);
  const int64_t q_blocks = q_given.size(1) / kBlock;
  const at::ScalarType type = q_given.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kHalf, "mark_wanted: bfloat16 or float16 was expected, got ", type);
  TORCH_CHECK((dims == 64 || dims == 128) && heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && q_blocks > 0 && tokens > 0 &&
                  tokens % kBlock == 0,
              "mark_wanted: head size 64 or 128, heads that share keys evenly and whole blocks of keys were expected, got ",
              q_given.sizes(), " and ", k_given.sizes());
  TORCH_CHECK(patterns > 0 && heads % patterns == 0 && window > 0 && scale > 0 && price > 0,
              "mark_wanted: patterns that divide the heads, and a window, a scale and a price above 0 were expected");
  check(q_given, "q", {heads, q_blocks * kBlock, dims}, type, device);
  check(k_given, "k", {kv_heads, tokens, dims}, type, device);
  TORCH_CHECK(rows.size() == 5, "mark_wanted: block, first, valid, slot and reach were expected");

  const c10::cuda::CUDAGuard guard(device);
  const Tensor q = readable(q_given), k = readable(k_given);
  WantedProblem p{};
  p.q = q.const_data_ptr(), p.k = k.const_data_ptr();
  p.q_head = head_stride(q), p.k_head = head_stride(k), p.q_row = q.stride(1), p.k_row = k.stride(1);
  p.tokens = tokens, p.heads = heads, p.kv_heads = kv_heads, p.q_blocks = q_blocks, p.heads_per_pattern = heads / patterns;
  p.element = type == at::kHalf ? kFloat16 : kBfloat16, p.head_size = dims, p.window = window;
  p.scale_log2 = static_cast<float>(scale * kLog2e);
  p.price = static_cast<float>(price), p.log2_price = static_cast<float>(std::log2(price));
  p.block = table<int64_t>(rows[0], "block", q_blocks), p.first = table<int64_t>(rows[1], "first", q_blocks);
  p.valid = table<int64_t>(rows[2], "valid", q_blocks), p.slot = table<int64_t>(rows[3], "slot", q_blocks);
  p.reach = table<int64_t>(rows[4], "reach", q_blocks);
  TORCH_CHECK(words.scalar_type() == at::kLong && words.device() == device && words.is_contiguous(),
              "words: a contiguous tensor of int64 on ", device, " was expected");
  p.words = reinterpret_cast<unsigned long long*>(words.mutable_data_ptr<int64_t>());
  const cudaError_t error = launch_wanted(p, c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(error == cudaSuccess, "the CUDA kernel that marks wanted keys was refused: ", cudaGetErrorString(error));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<HopTables>(m, "HopTables")
      .def(pybind11::init<int, bool, int, int, int, int, int, int, const Tensor&, const Tensor&, const Tensor&,
                          const std::optional<Tensor>&, const std::vector<Tensor>&, const std::vector<Tensor>&>());
  m.def("forward", &forward, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("backward", &backward, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("mark_wanted", &mark_wanted, pybind11::call_guard<pybind11::gil_scoped_release>());
}
