// The kernels of csrc/cuda, emulated: one block does all tiles. Called from tests/emulated_op.py, which lists the numbers.
#include "backward_mainloop.cuh"
#include "backward_producer.cuh"
#include "form_choice.cuh"
#include "mainloop.cuh"
#include "producer.cuh"
#include "wanted_mainloop.cuh"

using namespace ds_sparse_ring;

namespace {

const ForwardArguments* arguments;

template <Element kElement, class Form, Output kOutput>
void body() {
  const Ring<Form> ring(block.shared);
  const int warpgroup = block.thread / 128;
  if (warpgroup == Form::parts)
    Producer<Form>(*arguments, ring).run();
  else
    Consumer<kElement, Form>(arguments->problem, ring, warpgroup).template run<kOutput>();
  block.fibers[block.thread].done = true;
  for (;;) emulation::yield();
}

template <Element kElement, class Form>
void launch() {
  block.memory.assign(Ring<Form>::bytes + 2 * kAlignment, 0);
  block.shared = block.memory.data() + (kAlignment - reinterpret_cast<uintptr_t>(block.memory.data()) % kAlignment) % kAlignment;
  barriers.clear(), copies.clear(), products.assign(emulation::kThreads, {});
  Ring<Form>(block.shared).init();
  void (*const bodies[])() = {body<kElement, Form, kWriteElement>, body<kElement, Form, kWriteFloat>,
                              body<kElement, Form, kMergeFloat>};
  constexpr int kThreads = Form::parts * 128 + 32;
  emulation::run(kThreads, bodies[arguments->problem.output], [](int) { return true; }, land_copies);
}

template <Element kElement, int kHeadSize>
void launch_any() {
  with_form<kHeadSize>([](auto form) { launch<kElement, decltype(form)>(); });
}

const BackwardArguments* backward_arguments;

template <Element kElement, int kHeadSize>
void backward_body() {
  const BackwardMemory<kHeadSize> memory(block.shared);
  if (block.thread < 128)
    QueryProducer<kHeadSize>(*backward_arguments, memory).run();
  else
    QueryConsumer<kElement, kHeadSize>(*backward_arguments, memory).run();
  block.fibers[block.thread].done = true;
  for (;;) emulation::yield();
}

template <Element kElement, int kHeadSize>
void launch_backward() {
  block.memory.assign(BackwardMemory<kHeadSize>::bytes + 2 * kAlignment, 0);
  block.shared = block.memory.data() + (kAlignment - reinterpret_cast<uintptr_t>(block.memory.data()) % kAlignment) % kAlignment;
  barriers.clear(), copies.clear(), products.assign(emulation::kThreads, {});
  std::fill(additions, additions + emulation::kThreads, 0);
  for (NamedBarrier& b : named_barriers) b = {};
  BackwardMemory<kHeadSize>(block.shared).init();
  emulation::run(384, backward_body<kElement, kHeadSize>, [](int thread) { return thread < 32 || thread >= 128; }, land_copies);
}

const WantedArguments* wanted_arguments;
int wanted_number;

template <Element kElement, int kHeadSize>
void wanted_body() {
  const WantedTile tile(wanted_arguments->problem, wanted_number);
  const KeyRing<kHeadSize> ring(block.shared);
  if (block.thread == 0)
    copy_keys(*wanted_arguments, tile, ring);
  else
    WantedConsumer<kElement, kHeadSize>(wanted_arguments->problem, tile, ring).run(block.thread / 128 - 1);
  block.fibers[block.thread].done = true;
  for (;;) emulation::yield();
}

// a block for each tile, one after the other
template <Element kElement, int kHeadSize>
void launch_wanted() {
  const WantedProblem& p = wanted_arguments->problem;
  for (wanted_number = 0; wanted_number < p.kv_heads * p.q_blocks * p.tiles; ++wanted_number) {
    if (!WantedTile(p, wanted_number).marks(p)) continue;
    block.memory.assign(KeyRing<kHeadSize>::bytes + 2 * kAlignment, 0);
    block.shared = block.memory.data() + (kAlignment - reinterpret_cast<uintptr_t>(block.memory.data()) % kAlignment) % kAlignment;
    barriers.clear(), copies.clear(), products.assign(emulation::kThreads, {});
    KeyRing<kHeadSize>(block.shared).init(4 * p.tile_heads);
    emulation::run((1 + p.tile_heads) * 128, wanted_body<kElement, kHeadSize>, [](int thread) { return thread == 0 || thread >= 128; },
                   land_copies);
    if (!block.failure.empty()) return;
  }
}

// takes one number after the other
struct Numbers {
  const int64_t* next;

  template <class T>
  void into(T& x) {
    x = static_cast<T>(*next++);
  }
  template <class T>
  void into(T*& x) {
    x = reinterpret_cast<T*>(*next++);
  }
};

CUtensorMap take_map(Numbers& numbers, int64_t rows, int64_t heads) {
  TensorMap from{nullptr, rows, heads, 0, 0};
  numbers.into(from.data), numbers.into(from.head_stride), numbers.into(from.row_stride);
  CUtensorMap map{};
  static_assert(sizeof(from) <= sizeof(map));
  memcpy(&map, &from, sizeof(from));
  return map;
}

}  // namespace

// what went wrong; empty: nothing
extern "C" const char* emulated_forward(const int64_t* given, double scale) {
  ForwardArguments a{};
  ForwardProblem& p = a.problem;
  Tables& t = p.tables;
  Numbers x{given};
  int element, output;
  x.into(element), x.into(p.head_size), x.into(p.heads), x.into(p.kv_heads), x.into(p.q_blocks), x.into(p.k_blocks);
  x.into(p.heads_per_pattern), x.into(p.heads_together), x.into(output);
  p.element = static_cast<Element>(element), p.output = static_cast<Output>(output);
  x.into(t.full), x.into(t.own), x.into(t.base), x.into(t.q_stride), x.into(t.q_start), x.into(t.patterns), x.into(t.words);
  x.into(t.column_words), x.into(t.segments), x.into(t.q_segment), x.into(t.bits);
  x.into(t.list_ptr), x.into(t.list_values);
  x.into(t.column_ptr), x.into(t.column_ids), x.into(t.column_end), x.into(t.column_bits), x.into(p.columns);
  x.into(p.o), x.into(p.o_head), x.into(p.o_row), x.into(p.lse), x.into(p.lse_head);
  a.q = take_map(x, int64_t{p.q_blocks} * kBlock, p.heads);
  a.k = take_map(x, int64_t{p.k_blocks} * kBlock, p.kv_heads), a.v = take_map(x, int64_t{p.k_blocks} * kBlock, p.kv_heads);
  a.column_k = take_map(x, p.columns, 1), a.column_v = take_map(x, p.columns, 1);
  p.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  int32_t next_tile = 0;
  p.next_tile = &next_tile;
  arguments = &a;
  if (p.element == kBfloat16)
    p.head_size == 64 ? launch_any<kBfloat16, 64>() : launch_any<kBfloat16, 128>();
  else
    p.head_size == 64 ? launch_any<kFloat16, 64>() : launch_any<kFloat16, 128>();
  return block.failure.c_str();
}

// what went wrong; empty: nothing
extern "C" const char* emulated_backward(const int64_t* given, double scale) {
  BackwardArguments a{};
  BackwardProblem& p = a.problem;
  Tables& t = p.tables;
  Numbers x{given};
  int element;
  x.into(element), x.into(p.head_size), x.into(p.heads), x.into(p.kv_heads), x.into(p.q_blocks), x.into(p.k_blocks);
  x.into(p.heads_per_pattern), x.into(p.first_head), x.into(p.last_head);
  p.element = static_cast<Element>(element);
  x.into(t.full), x.into(t.own), x.into(t.base), x.into(t.q_stride), x.into(t.q_start), x.into(t.patterns), x.into(t.words);
  x.into(t.column_words), x.into(t.segments), x.into(p.k_segments), x.into(t.bits);
  x.into(t.reader_ptr), x.into(t.reader_values);
  x.into(t.column_ptr), x.into(t.column_ids), x.into(t.column_end), x.into(t.column_bits);
  x.into(p.column_tile_row), x.into(p.column_tile_begin), x.into(p.column_tiles), x.into(p.columns);
  x.into(p.lse), x.into(p.lse_head), x.into(p.delta), x.into(p.delta_head);
  x.into(p.dk), x.into(p.dk_head), x.into(p.dk_row), x.into(p.dv), x.into(p.dv_head), x.into(p.dv_row);
  x.into(p.d_column_k), x.into(p.d_column_v);
  const int64_t q_rows = int64_t{p.q_blocks} * kBlock, k_rows = int64_t{p.k_blocks} * kBlock;
  a.q = take_map(x, q_rows, p.heads), a.d_o = take_map(x, q_rows, p.heads), a.dq = take_map(x, q_rows, p.last_head - p.first_head);
  a.k = take_map(x, k_rows, p.kv_heads), a.v = take_map(x, k_rows, p.kv_heads);
  a.column_k = take_map(x, p.columns, 1), a.column_v = take_map(x, p.columns, 1);
  p.scale = static_cast<float>(scale), p.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  p.log2_scale = static_cast<float>(log2(scale));
  int32_t next_tile[kCounters] = {};
  p.column_parts = column_parts_of(p, 132);
  p.next_tile = next_tile;
  backward_arguments = &a;
  if (p.element == kBfloat16)
    p.head_size == 64 ? launch_backward<kBfloat16, 64>() : launch_backward<kBfloat16, 128>();
  else
    p.head_size == 64 ? launch_backward<kFloat16, 64>() : launch_backward<kFloat16, 128>();
  return block.failure.c_str();
}

// what went wrong; empty: nothing
extern "C" const char* emulated_wanted(const int64_t* given, double scale, double price) {
  WantedArguments a{};
  WantedProblem& p = a.problem;
  Numbers x{given};
  int element;
  x.into(element), x.into(p.head_size), x.into(p.heads), x.into(p.kv_heads), x.into(p.q_blocks), x.into(p.tokens);
  x.into(p.heads_per_pattern), x.into(p.window);
  x.into(p.block), x.into(p.first), x.into(p.valid), x.into(p.slot), x.into(p.reach), x.into(p.words);
  x.into(p.q), x.into(p.q_head), x.into(p.q_row);
  p.element = static_cast<Element>(element);
  a.k = take_map(x, p.tokens, p.kv_heads);
  p.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  p.price = static_cast<float>(price), p.log2_price = static_cast<float>(log2(price));
  cut_into_tiles(p);
  wanted_arguments = &a;
  block.failure.clear();
  if (p.element == kBfloat16)
    p.head_size == 64 ? launch_wanted<kBfloat16, 64>() : launch_wanted<kBfloat16, 128>();
  else
    p.head_size == 64 ? launch_wanted<kFloat16, 64>() : launch_wanted<kFloat16, 128>();
  return block.failure.c_str();
}
