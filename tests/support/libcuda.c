/* A libcuda.so.1 over host memory: enough of the driver API to run runtime/device/cuda_driver.py and
 * runtime/executors/cuda/gpu_device.py through the real cuda-bindings. Work is done when it is asked
 * for, or recorded while a stream is being captured. There is one kernel, `axpy`: y[i] += a * x[i]
 * over the whole grid; launched by cuLaunchKernelEx, it takes a's address. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUCCESS 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define INVALID_CONTEXT 201
#define NOT_READY 600
#define CAPTURE_UNSUPPORTED 900
#define CAPTURE_INVALIDATED 901
#define RELAXED 2
#define ALIGNMENT 256

static const size_t kTotal = 64 << 20;
static size_t used;
static int live_memory, live_host, live_modules, live_streams, live_graphs, live_executables;
static int live_events, retained, overlapping, delay;
static char streams[8];
static int num_streams;
static _Thread_local int is_current; /* a context is a thread's */

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
static void *captured_stream;
static int invalidated;
static int capture_mode = RELAXED;

static int of_stream(void *stream) {
  if (!is_current) return INVALID_CONTEXT;
  return (char *)stream >= streams && (char *)stream < streams + num_streams ? SUCCESS : INVALID_VALUE;
}

/* What a thread that captures may not do, unless it says otherwise. */
static int apart_from_capture(void) {
  if (!is_current) return INVALID_CONTEXT;
  if (!capturing || capture_mode == RELAXED) return SUCCESS;
  invalidated = 1;
  return CAPTURE_UNSUPPORTED;
}

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
  is_current = retained > 0 && context == (void *)&retained;
  return is_current ? SUCCESS : INVALID_VALUE;
}
static int f_cuMemGetInfo(size_t *available, size_t *total) {
  *available = kTotal - used;
  *total = kTotal;
  return SUCCESS;
}
static int f_cuMemAlloc(uint64_t *address, size_t bytes) {
  if (apart_from_capture()) return apart_from_capture();
  if (used + bytes > kTotal) return OUT_OF_MEMORY;
  used += bytes;
  live_memory++;
  size_t *header = aligned_alloc(ALIGNMENT, ALIGNMENT + (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  *header = bytes;
  *address = (uint64_t)(uintptr_t)header + ALIGNMENT;
  return SUCCESS;
}
static int f_cuMemFree(uint64_t address) {
  size_t *header = (size_t *)(uintptr_t)(address - ALIGNMENT);
  live_memory--;
  used -= *header;
  free(header);
  return SUCCESS;
}
static int f_cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
  live_host++;
  *address = malloc(bytes);
  return is_current ? (int)flags : INVALID_CONTEXT;
}
static int f_cuMemFreeHost(void *address) { live_host--; free(address); return SUCCESS; }
static int f_cuStreamCreate(void **stream, unsigned flags) {
  live_streams++;
  *stream = &streams[num_streams++];
  return flags == 1 ? SUCCESS : INVALID_VALUE; /* CU_STREAM_NON_BLOCKING */
}
static int f_cuStreamDestroy(void *stream) { live_streams--; return of_stream(stream); }
static int f_cuStreamSynchronize(void *stream) {
  int status = apart_from_capture();
  return status ? status : of_stream(stream);
}
static int f_cuEventCreate(void **event, unsigned flags) {
  live_events++;
  *event = calloc(1, sizeof(int));
  return flags == 2 ? SUCCESS : INVALID_VALUE; /* CU_EVENT_DISABLE_TIMING */
}
static int f_cuEventDestroy(void *event) { live_events--; free(event); return SUCCESS; }
static int f_cuEventRecord(void *event, void *stream) {
  *(int *)event = delay;
  return of_stream(stream);
}
static int f_cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  if (!event || flags) return INVALID_VALUE;
  return of_stream(stream);
}
static int f_cuEventQuery(void *event) {
  if (!is_current) return INVALID_CONTEXT;
  return --*(int *)event >= 0 ? NOT_READY : SUCCESS;
}
static int f_cuEventSynchronize(void *event) {
  *(int *)event = 0;
  return is_current ? SUCCESS : INVALID_CONTEXT;
}
static int f_cuMemcpyHtoDAsync(uint64_t to, const void *from, size_t bytes, void *stream) {
  if (capturing && stream == captured_stream) invalidated = 1;
  memcpy((void *)(uintptr_t)to, from, bytes);
  return of_stream(stream);
}
static int f_cuMemcpyDtoHAsync(void *to, uint64_t from, size_t bytes, void *stream) {
  memcpy(to, (void *)(uintptr_t)from, bytes);
  return of_stream(stream);
}
static int f_cuMemcpyDtoDAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
  return of_stream(stream);
}
static int f_cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream) {
  memset((void *)(uintptr_t)to, value, bytes);
  return of_stream(stream);
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
static int launch(Axpy one, void *function, unsigned shared, void *stream) {
  if (function != (void *)&capturing || shared != 16) return INVALID_VALUE;
  if (of_stream(stream)) return of_stream(stream);
  if (!capturing) return run(one);
  capturing->work[capturing->count++] = one;
  return SUCCESS;
}
static int f_cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned shared, void *stream, void **params,
                            void **extra) {
  if (extra || by != 1 || bz != 1 || gz != 1) return INVALID_VALUE;
  Axpy one = {*(float **)params[0], *(float **)params[1], *(int32_t *)params[2], gx * gy * bx};
  return launch(one, function, shared, stream);
}
typedef struct {
  int id; /* 6: PROGRAMMATIC_STREAM_SERIALIZATION */
  char padding[4];
  int value[16];
} Attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned num_attributes;
} Config;
static int f_cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
  if (extra || config->block[1] != 1 || config->block[2] != 1) return INVALID_VALUE;
  if (config->num_attributes) overlapping += config->attributes->id == 6 && *config->attributes->value;
  Axpy one = {*(float **)params[0], *(float **)params[1], **(int32_t **)params[2],
              config->grid[0] * config->grid[1] * config->grid[2] * config->block[0]};
  return launch(one, function, config->shared, config->stream);
}
static int f_cuFuncSetAttribute(void *function, int attribute, int value) {
  (void)function;
  return attribute == 8 && value > 48 << 10 ? SUCCESS : INVALID_VALUE; /* MAX_DYNAMIC_SHARED */
}
static int f_cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address,
                                    const uint64_t *sizes, const uint64_t *strides,
                                    const unsigned *box, const unsigned *steps, int interleave,
                                    int swizzle, int promotion, int fill) {
  if (type || interleave || swizzle != 3 || promotion != 2 || fill || steps[0] != 1)
    return INVALID_VALUE;
  uint64_t content[16] = {rank, (uintptr_t)address, sizes[0], sizes[1], strides[0], box[0], box[1]};
  memcpy(map, content, sizeof content);
  return SUCCESS;
}
static int f_cuStreamBeginCapture(void *stream, int mode) {
  capturing = calloc(1, sizeof *capturing);
  captured_stream = stream;
  capture_mode = 1;
  invalidated = 0;
  return mode == 1 ? of_stream(stream) : INVALID_VALUE; /* THREAD_LOCAL */
}
static int f_cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return SUCCESS;
}
static int f_cuStreamEndCapture(void *stream, void **graph) {
  *graph = capturing;
  capturing = NULL;
  capture_mode = RELAXED;
  if (invalidated) {
    free(*graph);
    *graph = NULL;
    return CAPTURE_INVALIDATED;
  }
  live_graphs++;
  return of_stream(stream);
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
  return of_stream(stream);
}
static int f_cuGetErrorString(int status, const char **text) {
  *text = status == OUT_OF_MEMORY ? "out of memory" : "something else";
  return SUCCESS;
}

/* What is alive, for the test: all zero after close. */
int stub_alive(void) {
  return live_memory + live_host + live_modules + live_streams + live_graphs + live_executables +
         live_events + retained;
}
int stub_graphs(void) { return live_executables; }
int stub_overlapping(void) { return overlapping; }
/* Events that are set from now on are not there yet for so many queries. */
void stub_delay(int queries) { delay = queries; }

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
    ENTRY(cuGetErrorString), ENTRY(cuEventCreate), ENTRY(cuEventDestroy), ENTRY(cuEventRecord),
    ENTRY(cuEventQuery), ENTRY(cuEventSynchronize), ENTRY(cuLaunchKernelEx),
    ENTRY(cuFuncSetAttribute), ENTRY(cuTensorMapEncodeTiled),
    ENTRY(cuThreadExchangeStreamCaptureMode), ENTRY(cuStreamWaitEvent),
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
