/* A libcuda.so.1 over host memory: enough of the driver API to run runtime/device/cuda_driver.py
 * through the real cuda-bindings. Work is done when it is asked for, or recorded while the stream
 * is being captured. There is one kernel, `axpy`: y[i] += a * x[i] over the whole grid. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUCCESS 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define CAPTURE_INVALIDATED 901

static const size_t kTotal = 1 << 20;
static size_t used;
static int live_memory, live_host, live_modules, live_streams, live_graphs, live_executables;
static int retained, is_current;

typedef struct {
  float *y;
  const float *x;
  int32_t a;
  unsigned n;
} Axpy;

typedef struct {
  Axpy work[8];
  int count;
} Graph;

static Graph *capturing;
static int invalidated;

static int run(Axpy one) {
  for (unsigned i = 0; i < one.n; i++) one.y[i] += one.a * one.x[i];
  return SUCCESS;
}

static int f_cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
static int f_cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal; }
static int f_cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 8 : 9;
  return device;
}
static int f_cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = &retained;
  retained++;
  return device;
}
static int f_cuDevicePrimaryCtxRelease(int device) { retained--; return device; }
static int f_cuCtxSetCurrent(void *context) {
  is_current = context == (void *)&retained;
  return is_current ? SUCCESS : INVALID_VALUE;
}
static int f_cuMemGetInfo(size_t *available, size_t *total) {
  *available = kTotal - used;
  *total = kTotal;
  return SUCCESS;
}
static int f_cuMemAlloc(uint64_t *address, size_t bytes) {
  if (used + bytes > kTotal) return OUT_OF_MEMORY;
  used += bytes;
  live_memory++;
  *address = (uint64_t)(uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
  return SUCCESS;
}
static int f_cuMemFree(uint64_t address) {
  live_memory--;
  free((void *)(uintptr_t)address);
  return SUCCESS;
}
static int f_cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
  live_host++;
  *address = malloc(bytes);
  return (int)flags;
}
static int f_cuMemFreeHost(void *address) { live_host--; free(address); return SUCCESS; }
static int f_cuStreamCreate(void **stream, unsigned flags) {
  live_streams++;
  *stream = &live_streams;
  return flags == 1 ? SUCCESS : INVALID_VALUE; /* CU_STREAM_NON_BLOCKING */
}
static int f_cuStreamDestroy(void *stream) { live_streams--; return stream != &live_streams; }
static int f_cuStreamSynchronize(void *stream) { return stream != &live_streams; }
static int f_cuMemcpyHtoDAsync(uint64_t to, const void *from, size_t bytes, void *stream) {
  if (capturing) invalidated = 1;
  memcpy((void *)(uintptr_t)to, from, bytes);
  return stream != &live_streams;
}
static int f_cuMemcpyDtoHAsync(void *to, uint64_t from, size_t bytes, void *stream) {
  memcpy(to, (void *)(uintptr_t)from, bytes);
  return stream != &live_streams;
}
static int f_cuMemcpyDtoDAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
  return stream != &live_streams;
}
static int f_cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream) {
  memset((void *)(uintptr_t)to, value, bytes);
  return stream != &live_streams;
}
static int f_cuModuleLoadData(void **module, const void *image) {
  if (memcmp(image, "\177ELF", 4)) return 200; /* INVALID_IMAGE */
  live_modules++;
  *module = &live_modules;
  return SUCCESS;
}
static int f_cuModuleUnload(void *module) { live_modules--; return module != &live_modules; }
static int f_cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = &capturing;
  if (module != &live_modules) return INVALID_VALUE;
  return strcmp(name, "axpy") ? 500 : SUCCESS; /* NOT_FOUND */
}
static int f_cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned shared, void *stream, void **params,
                            void **extra) {
  if (function != (void *)&capturing || stream != &live_streams || extra || shared != 16 ||
      by != 1 || bz != 1 || gz != 1)
    return INVALID_VALUE;
  Axpy one = {.n = gx * gy * bx};
  one.y = *(float **)params[0];
  one.x = *(float **)params[1];
  one.a = *(int32_t *)params[2];
  if (!capturing) return run(one);
  capturing->work[capturing->count++] = one;
  return SUCCESS;
}
static int f_cuStreamBeginCapture(void *stream, int mode) {
  capturing = calloc(1, sizeof *capturing);
  invalidated = 0;
  return stream != &live_streams || mode != 1; /* THREAD_LOCAL */
}
static int f_cuStreamEndCapture(void *stream, void **graph) {
  *graph = capturing;
  capturing = NULL;
  if (invalidated) return CAPTURE_INVALIDATED;
  live_graphs++;
  return stream != &live_streams;
}
static int f_cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
  live_executables++;
  *executable = memcpy(malloc(sizeof(Graph)), graph, sizeof(Graph));
  return (int)flags;
}
static int f_cuGraphDestroy(void *graph) { live_graphs--; free(graph); return SUCCESS; }
static int f_cuGraphExecDestroy(void *graph) { live_executables--; free(graph); return SUCCESS; }
static int f_cuGraphLaunch(void *executable, void *stream) {
  Graph *graph = executable;
  for (int i = 0; i < graph->count; i++) run(graph->work[i]);
  return stream != &live_streams;
}
static int f_cuGetErrorString(int status, const char **text) {
  *text = status == OUT_OF_MEMORY ? "out of memory" : "something else";
  return SUCCESS;
}

/* What is alive, for the test: all zero after close. */
int stub_alive(void) {
  return live_memory + live_host + live_modules + live_streams + live_graphs + live_executables +
         retained;
}

#define ENTRY(name) {#name, (void *)f_##name}
static const struct {
  const char *name;
  void *function;
} kEntries[] = {
    ENTRY(cuInit), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetAttribute),
    ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuDevicePrimaryCtxRelease), ENTRY(cuCtxSetCurrent),
    ENTRY(cuMemGetInfo), ENTRY(cuMemAlloc), ENTRY(cuMemFree), ENTRY(cuMemHostAlloc),
    ENTRY(cuMemFreeHost), ENTRY(cuStreamCreate), ENTRY(cuStreamDestroy),
    ENTRY(cuStreamSynchronize), ENTRY(cuMemcpyHtoDAsync), ENTRY(cuMemcpyDtoHAsync),
    ENTRY(cuMemcpyDtoDAsync), ENTRY(cuMemsetD8Async), ENTRY(cuModuleLoadData),
    ENTRY(cuModuleUnload), ENTRY(cuModuleGetFunction), ENTRY(cuLaunchKernel),
    ENTRY(cuStreamBeginCapture), ENTRY(cuStreamEndCapture), ENTRY(cuGraphInstantiateWithFlags),
    ENTRY(cuGraphDestroy), ENTRY(cuGraphExecDestroy), ENTRY(cuGraphLaunch),
    ENTRY(cuGetErrorString),
};

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                        int *found) {
  (void)version;
  (void)flags;
  *function = NULL;
  if (found) *found = 1;
  if (!strcmp(name, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
  for (size_t i = 0; i < sizeof kEntries / sizeof *kEntries; i++)
    if (!strcmp(name, kEntries[i].name)) *function = kEntries[i].function;
  if (found && *function) *found = 0;
  return *function ? SUCCESS : 500;
}

/* What is looked up by its plain name, without cuGetProcAddress. */
int cuInit(unsigned flags) { return f_cuInit(flags); }
int cuDeviceGet(int *device, int ordinal) { return f_cuDeviceGet(device, ordinal); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return f_cuDeviceGetAttribute(value, attribute, device);
}
