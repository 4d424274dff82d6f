// In place of the driver's header: the one type that the kernels name.
#pragma once

typedef struct {
  unsigned long long opaque[16];
} CUtensorMap;
