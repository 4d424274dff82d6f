// Vertical-slash attention, forward, for sm_90a, from the implicit index: the kernel and its launch.
//
// A block is one producer warp and two or three warpgroups of 64 query rows each that share stages of keys and values: see
// ring.cuh.
// One file of each element type and head size includes this, so that they are compiled side by side.
#pragma once

#include "form_choice.cuh"
#include "forward.cuh"
#include "mainloop.cuh"
#include "producer.cuh"

namespace ds_sparse_ring {

template <Element kElement, class Form, Output kOutput>
__global__ void __launch_bounds__(Form::threads, Form::blocks) forward_kernel(const __grid_constant__ ForwardArguments a) {
  // a launch gives all threads equally many registers; who asks for more than others have given back waits for ever
  constexpr int kLaunchRegisters = 65536 / Form::threads / 8 * 8;
  static_assert(Form::producer_registers + Form::parts * Form::consumer_registers <= (Form::parts + 1) * kLaunchRegisters);
  extern __shared__ __align__(kAlignment) uint8_t memory[];
  const Ring<Form> ring(memory);
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    if (shared_address(memory) % kAlignment != 0) __trap();  // swizzled copies would go elsewhere
    ring.init();
    prefetch_map(&a.q), prefetch_map(&a.k), prefetch_map(&a.v), prefetch_map(&a.column_k), prefetch_map(&a.column_v);
  }
  __syncthreads();
  if (warpgroup == Form::parts) {
    if constexpr (Form::producer_registers > 0) give_registers<Form::producer_registers>();
    if (threadIdx.x < Form::parts * 128 + 32) Producer<Form>(a, ring).run();
  } else {
    if constexpr (Form::consumer_registers > 0) take_registers<Form::consumer_registers>();
    Consumer<kElement, Form>(a.problem, ring, warpgroup).template run<kOutput>();
  }
}

template <Element kElement, class Form, Output kOutput>
cudaError_t launch_forward_kernel(const ForwardArguments& a, int multiprocessors, cudaStream_t stream) {
  constexpr uint32_t shared_bytes = Ring<Form>::bytes;
  const auto kernel = forward_kernel<kElement, Form, kOutput>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const int tiles = TileScheduler<Form::parts>(a.problem).tiles, blocks = Form::blocks * multiprocessors;
  kernel<<<tiles < blocks ? tiles : blocks, Form::threads, shared_bytes, stream>>>(a);
  return cudaGetLastError();
}

template <Element kElement, class Form>
cudaError_t launch_form(const ForwardArguments& a, int multiprocessors, cudaStream_t stream) {
  switch (a.problem.output) {
    case kWriteElement:
      return launch_forward_kernel<kElement, Form, kWriteElement>(a, multiprocessors, stream);
    case kWriteFloat:
      return launch_forward_kernel<kElement, Form, kWriteFloat>(a, multiprocessors, stream);
    default:
      return launch_forward_kernel<kElement, Form, kMergeFloat>(a, multiprocessors, stream);
  }
}

template <Element kElement, int kHeadSize>
cudaError_t launch_forward(const ForwardArguments& a, int multiprocessors, cudaStream_t stream) {
  return with_form<kHeadSize>([&](auto form) { return launch_form<kElement, decltype(form)>(a, multiprocessors, stream); });
}

}  // namespace ds_sparse_ring
