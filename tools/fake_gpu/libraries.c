/* NCCL of ranks that hear nothing of each other, and handles of cuBLAS. See runtime.c.
 *
 * A collective gives each rank its own part in the place of every other's.
 */
#include <stdlib.h>
#include <string.h>

typedef struct { int rank, size; } Communicator;
typedef struct { char bytes[128]; } Id;

static int create(Communicator **to, int size, int rank) {
    *to = malloc(sizeof **to);
    **to = (Communicator){rank, size};
    return 0;
}
int ncclGetVersion(int *to) { *to = 22907; return 0; }
const char *ncclGetErrorString(int of) { return "fake"; }
const char *ncclGetLastError(void *of) { return "fake"; }
int ncclGetUniqueId(Id *to) { memset(to, 7, sizeof *to); return 0; }
int ncclCommInitRank(Communicator **to, int n, Id id, int rank) { return create(to, n, rank); }
int ncclCommInitRankConfig(Communicator **to, int n, Id id, int rank, void *with) { return create(to, n, rank); }
int ncclCommInitRankScalable(Communicator **to, int n, int rank, int ids, Id *id, void *with) {
    return create(to, n, rank);
}
/* The size of a part is not known without the others: no collective of it is larger than that. */
int ncclCommSplit(Communicator *of, int color, int key, Communicator **to, void *with) {
    *to = color < 0 ? NULL : memcpy(malloc(sizeof **to), of, sizeof *of);
    if (*to) **to = (Communicator){0, 1};
    return 0;
}
int ncclCommCount(Communicator *of, int *to) { *to = of->size; return 0; }
int ncclCommUserRank(Communicator *of, int *to) { *to = of->rank; return 0; }
int ncclCommGetAsyncError(Communicator *of, int *to) { *to = 0; return 0; }
static size_t bytes(size_t count, int type) {
    static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * sizes[type];
}
static int copied(void *to, const void *from, size_t size) {
    if (to != from) memmove(to, from, size);
    return 0;
}
int ncclAllReduce(const void *from, void *to, size_t n, int type, int how, void *of, void *stream) {
    return copied(to, from, bytes(n, type));
}
int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, void *of, void *stream) {
    return copied(to, from, bytes(n, type));
}
int ncclAllGather(const void *from, char *to, size_t n, int type, Communicator *of, void *stream) {
    for (int i = 0; i < of->size; i++) copied(to + i * bytes(n, type), from, bytes(n, type));
    return 0;
}
int ncclReduceScatter(const char *from, void *to, size_t n, int type, int how, Communicator *of) {
    return copied(to, from + of->rank * bytes(n, type), bytes(n, type));
}

static int handle(void **to) { *to = calloc(1, 4096); return 0; }
int cublasCreate_v2(void **to) { return handle(to); }
int cublasLtCreate(void **to) { return handle(to); }
int cublasLtMatmulDescCreate(void **to) { return handle(to); }
int cublasLtMatmulPreferenceCreate(void **to) { return handle(to); }
int cublasLtMatrixLayoutCreate(void **to) { return handle(to); }
int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g,
                                   int most, void *results, int *count) {
    *count = 1;
    return 0;
}
int cusparseCreate(void **to) { return handle(to); }
int cusolverDnCreate(void **to) { return handle(to); }
int cudnnCreate(void **to) { return handle(to); }
