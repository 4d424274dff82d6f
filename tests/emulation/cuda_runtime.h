// In place of the runtime's header: the types that a launch names.
#pragma once

typedef int cudaError_t;
typedef void* cudaStream_t;
