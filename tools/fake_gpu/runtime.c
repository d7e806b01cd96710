/* GPUs that are not there: CUDA's runtime, and what torch asks NVML for.
 *
 * Their memory is the host's, and copies are made at once; kernels do nothing, so that tensors keep
 * bytes that lay there. FAKE_GPUS: how many; FAKE_GPU_GIB: of how much; FAKE_GPU_NVML=0: no NVML.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#undef cudaGetDeviceProperties
#define MOST_DEVICES 16
#define MOST_BLOCKS 65536
#define DONE return cudaSuccess;

typedef struct { char *start; size_t size; int device; enum cudaMemoryType kind; } Block;
static Block blocks[MOST_BLOCKS];
static int last;
static size_t used[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device;
static __thread cudaError_t error;

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? (size_t)atol(text) : otherwise;
}
static size_t total(void) { return number("FAKE_GPU_GIB", 80) << 30; }
static int all(void) { return (int)number("FAKE_GPUS", 1); }
static int visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) return all();
    int count = *text && strcmp(text, "-1");
    for (; count && *text; text++) count += *text == ',';
    return count < all() ? count : all();
}
static cudaError_t failed(cudaError_t what) { return error = what; }

/* Take memory into account; false if a device has no more. */
static int take(int where, size_t size) {
    pthread_mutex_lock(&lock);
    int fits = used[where] + size <= total();
    if (fits) used[where] += size;
    pthread_mutex_unlock(&lock);
    return fits;
}
static void *add(void *start, size_t size, enum cudaMemoryType kind) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < last && blocks[i].start) i++;
    if (i == MOST_BLOCKS) abort();
    if (i == last) last++;
    blocks[i] = (Block){start, size, device, kind};
    pthread_mutex_unlock(&lock);
    return start;
}
static Block found(const void *address, int removes) {
    Block block = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < last; i++) {
        char *start = blocks[i].start, *here = (char *)address;
        if (!start || here < start || here >= start + blocks[i].size) continue;
        block = blocks[i];
        if (removes) blocks[i].start = NULL;
        if (removes && block.kind == cudaMemoryTypeDevice) used[block.device] -= block.size;
        break;
    }
    pthread_mutex_unlock(&lock);
    return block;
}
static void *mapped(size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
}

/* --- devices ---------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = visible();
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *to) { *to = device; return cudaSuccess; }
cudaError_t cudaSetDevice(int to) {
    if (to < 0 || to >= visible()) return failed(cudaErrorInvalidDevice);
    device = to;
    return cudaSuccess;
}
/* Of capability 8.0: for a newer one torch prefers cuDNN's attention, which is not stubbed. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int which) {
    memset(to, 0, sizeof *to);
    strcpy(to->name, "Fake A100");
    to->major = 8;
    to->multiProcessorCount = 108;
    to->totalGlobalMem = total();
    to->warpSize = 32, to->maxThreadsPerMultiProcessor = 2048;
    to->maxThreadsPerBlock = to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024;
    to->maxThreadsDim[2] = 64;
    to->sharedMemPerBlock = 49152, to->sharedMemPerBlockOptin = 166912;
    to->sharedMemPerMultiprocessor = 167936;
    to->regsPerBlock = to->regsPerMultiprocessor = 65536;
    to->l2CacheSize = 40 << 20;
    to->maxGridSize[0] = 2147483647;
    to->maxGridSize[1] = to->maxGridSize[2] = 65535;
    to->textureAlignment = 512;
    to->pciDeviceID = to->uuid.bytes[15] = which;
    to->unifiedAddressing = to->concurrentKernels = to->managedMemory = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *to, enum cudaDeviceAttr name, int which) {
    struct cudaDeviceProp of;
    cudaGetDeviceProperties(&of, which);
    switch (name) {
    case cudaDevAttrMultiProcessorCount: *to = of.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *to = of.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *to = of.sharedMemPerBlock; break;
    case cudaDevAttrComputeCapabilityMajor: *to = of.major; break;
    case cudaDevAttrComputeCapabilityMinor: *to = of.minor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *to = of.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *to = of.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *to = of.warpSize; break;
    case cudaDevAttrMaxGridDimX: *to = of.maxGridSize[0]; break;
    default: *to = 1;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *to, int a, int b) { *to = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *to, int of) { *to = (void *)8; DONE }
cudaError_t cudaDeviceGetPCIBusId(char *to, int size, int of) { snprintf(to, size, "0000:%02x:00.0", of); DONE }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; DONE }
cudaError_t cudaDriverGetVersion(int *to) { *to = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *to) { *to = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { cudaError_t it = error; error = cudaSuccess; return it; }
cudaError_t cudaPeekAtLastError(void) { return error; }
const char *cudaGetErrorName(cudaError_t of) { return "fake"; }
const char *cudaGetErrorString(cudaError_t of) {
    return of == cudaErrorMemoryAllocation ? "out of memory" : "an error of the fake GPU";
}

/* --- memory ----------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **to, size_t size) {
    if (!take(device, size)) return failed(cudaErrorMemoryAllocation);
    *to = add(mapped(size), size, cudaMemoryTypeDevice);
    return cudaSuccess;
}
cudaError_t cudaFree(void *address) {
    Block block = found(address, 1);
    if (block.start) munmap(block.start, block.size);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **to, size_t size, unsigned flags) {
    *to = add(mapped(size), size, cudaMemoryTypeHost);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *address) { return cudaFree(address); }
cudaError_t cudaHostRegister(void *at, size_t n, unsigned f) { add(at, n, cudaMemoryTypeHost); DONE }
cudaError_t cudaHostUnregister(void *address) { found(address, 1); return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *to, const void *address) {
    Block block = found(address, 0);
    memset(to, 0, sizeof *to);
    to->type = block.start ? block.kind : cudaMemoryTypeUnregistered;
    to->device = block.device;
    to->devicePointer = (void *)address;
    to->hostPointer = block.kind == cudaMemoryTypeHost ? (void *)address : NULL;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *of) { *of = total(); *left = *of - used[device]; DONE }
#define COPY(name, ...) cudaError_t name(void *to, __VA_ARGS__) { memcpy(to, from, n); DONE }
COPY(cudaMemcpy, const void *from, size_t n, enum cudaMemcpyKind k)
COPY(cudaMemcpyAsync, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s)
COPY(cudaMemcpyPeerAsync, int a, const void *from, int b, size_t n, cudaStream_t s)
cudaError_t cudaMemset(void *to, int value, size_t n) { memset(to, value, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *to, int v, size_t n, cudaStream_t s) { memset(to, v, n); DONE }
cudaError_t cudaGetSymbolAddress(void **to, const void *of) { *to = (void *)of; return cudaSuccess; }

/* Of segments that can grow: an address range, and handles of memory that is mapped into it. */
static CUresult reserve(CUdeviceptr *to, size_t size) {
    *to = (CUdeviceptr)mapped(size);
    add((void *)*to, size, cudaMemoryTypeManaged);
    return CUDA_SUCCESS;
}
static CUresult unreserve(CUdeviceptr at) { cudaFree((void *)at); DONE }
typedef struct { size_t size; int device; } Handle;
static CUresult create(Handle **to, size_t size, const CUmemAllocationProp *of) {
    if (!take(of->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *to = malloc(sizeof **to);
    **to = (Handle){size, of->location.id};
    return CUDA_SUCCESS;
}
static CUresult release(Handle *it) {
    pthread_mutex_lock(&lock);
    used[it->device] -= it->size;
    pthread_mutex_unlock(&lock);
    free(it);
    return CUDA_SUCCESS;
}
static CUresult unmap(CUdeviceptr at, size_t size) { madvise((void *)at, size, MADV_DONTNEED); DONE }
static CUresult granularity(size_t *to) { *to = 2 << 20; DONE }
static CUresult text(CUresult of, const char **to) { *to = "fake"; DONE }
static CUresult nothing(void) { DONE }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *how) {
    static const struct { const char *name; void *function; } own[] = {
        {"cuMemAddressReserve", reserve}, {"cuMemAddressFree", unreserve}, {"cuMemCreate", create},
        {"cuMemRelease", release}, {"cuMemUnmap", unmap}, {"cuGetErrorString", text},
        {"cuGetErrorName", text}, {"cuMemGetAllocationGranularity", granularity},
    };
    *to = nothing;
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (!strcmp(name, own[i].name)) *to = own[i].function;
    if (how) *how = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* --- streams, events, kernels: all of them are done at once ------------------------------------- */

static void *next(void) { static long ids = 64; return (void *)__sync_add_and_fetch(&ids, 8); }
cudaError_t cudaEventCreate(cudaEvent_t *to) { *to = next(); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned f) { *to = next(); DONE }
cudaError_t cudaEventElapsedTime(float *to, cudaEvent_t a, cudaEvent_t b) { *to = 1; DONE }
cudaError_t cudaStreamCreate(cudaStream_t *to) { *to = next(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *to, unsigned f, int p) { *to = next(); DONE }
cudaError_t cudaStreamGetPriority(cudaStream_t of, int *to) { *to = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t of, enum cudaStreamCaptureStatus *to) {
    *to = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t of, enum cudaStreamCaptureStatus *to,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    if (count) *count = 0;
    return cudaStreamIsCapturing(of, to);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *with) { call(with); DONE }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *of) {
    memset(to, 0, sizeof *to);
    to->maxThreadsPerBlock = 1024;
    to->ptxVersion = to->binaryVersion = 80;
    to->numRegs = 32;
    to->maxDynamicSharedSizeBytes = 166912;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *to, const void *of, int block,
                                                                   size_t memory, unsigned flags) {
    *to = 8;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *of) { return malloc(8); }
cudaError_t __cudaGetKernel(void **to, const void *of) { *to = (void *)of; return cudaSuccess; }
static __thread struct { dim3 grid, block; size_t memory; void *stream; } launch;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t memory, void *stream) {
    launch.grid = grid, launch.block = block, launch.memory = memory, launch.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *memory, void *stream) {
    *grid = launch.grid, *block = launch.block, *memory = launch.memory;
    *(void **)stream = launch.stream;
    return cudaSuccess;
}

/* --- NVML: counts devices without CUDA ---------------------------------------------------------- */

int nvmlInit(void) { return number("FAKE_GPU_NVML", 1) ? 0 : 12; }
int nvmlDeviceGetCount_v2(int *to) { *to = all(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned which, void **to) { *to = (void *)(which + 8l); return 0; }
int nvmlDeviceGetUUID(void *of, char *to, unsigned size) {
    snprintf(to, size, "GPU-00000000-0000-0000-0000-%012lx", (long)of - 8);
    return 0;
}
