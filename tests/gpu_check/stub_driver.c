/* A CUDA driver without a device: memory is the host's, launches are written to a file and do nothing. It shows
   that the calls go through cuda.bindings as the driver's interface wants them. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { unsigned gx, gy, gz, bx, by, bz, smem; void *stream; void *attrs; unsigned count; } Config;
typedef struct { int id; char pad[4]; union { char bytes[64]; struct { unsigned x, y, z; } dims; int flag; } value; } Attribute;
typedef struct { double at; } Event;

static void *current;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec / 1e6; }
static void note(const char *text) {
    const char *path = getenv("STUB_DRIVER_LOG");
    FILE *f = path ? fopen(path, "a") : 0;
    if (f) { fputs(text, f); fclose(f); }
}

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int ordinal) { *d = ordinal; return ordinal ? 101 : 0; }
int cuDeviceGetName(char *name, int n, int d) { snprintf(name, n, "Stub GPU"); return 0; }
int cuDeviceTotalMem(size_t *n, int d) { *n = (size_t)1 << 34; return 0; }
int cuDeviceGetAttribute(int *v, int which, int d) {
    switch (which) {
    case 75: *v = 9; break;          /* compute capability, major */
    case 76: *v = 0; break;          /* minor */
    case 16: *v = 132; break;        /* multiprocessors */
    case 38: *v = 50 << 20; break;   /* L2 */
    case 13: *v = 1980000; break;    /* clock, kHz */
    default: return 1;
    }
    return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)0xC0; return 0; }
int cuDevicePrimaryCtxRelease(int d) { return 0; }
int cuCtxSetCurrent(void *c) { current = c; return 0; }
int cuCtxGetCurrent(void **c) { *c = current; return 0; }
int cuMemAlloc(uintptr_t *p, size_t n) {
    void *made = 0;
    if (n > (size_t)1 << 34 || posix_memalign(&made, 256, n)) return 2;
    *p = (uintptr_t)made;
    return 0;
}
int cuMemFree(uintptr_t p) { free((void *)p); return 0; }
int cuMemcpyHtoD(uintptr_t to, const void *from, size_t n) { memcpy((void *)to, from, n); return 0; }
int cuMemcpyDtoH(void *to, uintptr_t from, size_t n) { memcpy(to, (void *)from, n); return 0; }
int cuMemsetD8Async(uintptr_t p, unsigned char byte, size_t n, void *s) {
    memset((void *)p, byte, n > 1 << 26 ? 1 << 26 : n);   /* a flush need not be whole */
    return 0;
}
int cuStreamCreate(void **s, unsigned flags) { *s = (void *)0x51; return 0; }
int cuStreamDestroy(void *s) { return 0; }
int cuStreamSynchronize(void *s) { return s == (void *)0x51 ? 0 : 400; }
int cuStreamBeginCapture(void *s, int mode) { return s == (void *)0x51 && mode == 1 ? 0 : 1; }
int cuStreamEndCapture(void *s, void **g) { *g = (void *)0x61; return 0; }
int cuGraphInstantiateWithFlags(void **x, void *g, unsigned long long flags) { *x = (void *)0x62; return g == (void *)0x61 ? 0 : 1; }
int cuGraphLaunch(void *x, void *s) { return x == (void *)0x62 ? 0 : 1; }
int cuGraphExecDestroy(void *x) { return 0; }
int cuGraphDestroy(void *g) { return 0; }
int cuEventCreate(void **e, unsigned flags) { *e = calloc(1, sizeof(Event)); return 0; }
int cuEventDestroy(void *e) { free(e); return 0; }
int cuEventRecordWithFlags(void *e, void *s, unsigned flags) { ((Event *)e)->at = now(); return flags <= 1 ? 0 : 1; }
int cuEventElapsedTime(float *ms, void *a, void *b) { *ms = (float)(((Event *)b)->at - ((Event *)a)->at); return 0; }
int cuModuleLoadData(void **m, const void *image) {
    *m = (void *)0x71;
    return memcmp(image, "\177ELF", 4) ? 200 : 0;
}
int cuModuleUnload(void *m) { return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = strdup(name); return 0; }
int cuFuncSetAttribute(void *f, int which, int value) { return 0; }
int cuLaunchKernelEx(const Config *c, void *f, void **parameters, void **extra) {
    char text[512];
    int n = snprintf(text, sizeof text, "%s grid %u %u %u block %u %u %u smem %u", (char *)f, c->gx, c->gy, c->gz, c->bx,
                     c->by, c->bz, c->smem);
    for (unsigned i = 0; i < c->count; i++) {
        Attribute *a = (Attribute *)c->attrs + i;
        if (a->id == 4) n += snprintf(text + n, sizeof text - n, " cluster %u", a->value.dims.x);
        if (a->id == 6) n += snprintf(text + n, sizeof text - n, " pdl %d", a->value.flag);
    }
    snprintf(text + n, sizeof text - n, " first %llx\n", parameters ? *(unsigned long long *)parameters[0] : 0ull);
    note(text);
    return c->stream == (void *)0x51 ? 0 : 400;
}

#define ENTRY(name) { #name, (void *)name }
static const struct { const char *name; void *function; } table[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName),
    ENTRY(cuDeviceTotalMem), ENTRY(cuDeviceGetAttribute), ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuDevicePrimaryCtxRelease),
    ENTRY(cuCtxSetCurrent), ENTRY(cuCtxGetCurrent), ENTRY(cuMemAlloc), ENTRY(cuMemFree), ENTRY(cuMemcpyHtoD),
    ENTRY(cuMemcpyDtoH), ENTRY(cuMemsetD8Async), ENTRY(cuStreamCreate), ENTRY(cuStreamDestroy), ENTRY(cuStreamSynchronize),
    ENTRY(cuStreamBeginCapture), ENTRY(cuStreamEndCapture), ENTRY(cuGraphInstantiateWithFlags), ENTRY(cuGraphLaunch),
    ENTRY(cuGraphExecDestroy), ENTRY(cuGraphDestroy), ENTRY(cuEventCreate), ENTRY(cuEventDestroy),
    ENTRY(cuEventRecordWithFlags), ENTRY(cuEventElapsedTime), ENTRY(cuModuleLoadData), ENTRY(cuModuleUnload),
    ENTRY(cuModuleGetFunction), ENTRY(cuFuncSetAttribute), ENTRY(cuLaunchKernelEx),
};

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    for (unsigned i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(symbol, table[i].name)) {
            *function = table[i].function;
            if (status) *status = 0;
            return 0;
        }
    *function = 0;
    if (status) *status = 1;
    return 500;
}
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, 0);
}
