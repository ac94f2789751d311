/* A stand-in for libcuda.so.1 on machines without an NVIDIA driver.
 *
 * The Legate and cuPyNumeric wheels are linked against the driver library, so without it they fail at
 * import, even when they are only to run on CPUs. lazyshards.engines.bringup loads this library first, and
 * only when no real driver is found; its soname (set by the build) is libcuda.so.1, so that the dynamic
 * loader counts the dependency as met. Every call answers "no device", which is the truth.
 *
 * It uses nothing of the C library and is linked with -nostdlib: one binary then serves every Linux, old or
 * new, glibc or musl, and the wheel that carries it can say so in its tag.
 */

typedef int CUresult;
typedef unsigned long long CUdeviceptr;

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE = 100 };

/* The newest CUDA that the wheels are built for: a lower number would read as a driver too old for them. */
enum { DRIVER_VERSION = 13000 };

/* How bringup tells this library from a real driver: dlopen("libcuda.so.1") finds either, by soname. */
extern const int lazyshards_cuda_stub;
const int lazyshards_cuda_stub = 1;

/* The four that liblegion is linked to by name, so that it loads, and the one that is called first. */

CUresult cuInit(unsigned flags)
{
    (void)flags;
    return NO_DEVICE;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    (void)error;
    if (!name) return INVALID_VALUE;
    *name = "CUDA_ERROR_NO_DEVICE";
    return SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    (void)error;
    if (!text) return INVALID_VALUE;
    *text = "no NVIDIA driver on this machine (lazyshards runs Legate on the CPUs)";
    return SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    (void)pointer;
    return NO_DEVICE;
}

CUresult cuMemFreeHost(void *pointer)
{
    (void)pointer;
    return NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version)
{
    if (!version) return INVALID_VALUE;
    *version = DRIVER_VERSION;
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    if (!count) return INVALID_VALUE;
    *count = 0;
    return NO_DEVICE;
}

/* What every function that is not named here resolves to. It is called with other arguments than it
 * declares; the C calling conventions of the platforms that the wheels exist for (x86-64, AArch64) leave
 * the arguments to the caller, so ignoring them is safe. */
static CUresult no_device(void)
{
    return NO_DEVICE;
}

static int same(const char *a, const char *b)
{
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

/* Legate takes the whole driver API through this one. Some versions ask for functions at start-up and give
 * up when one is not found, before they learn that there is no device: so every name is "found". */
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status)
{
    (void)version;
    (void)flags;
    if (!name || !function) return INVALID_VALUE;
    if (same(name, "cuInit")) *function = (void *)cuInit;
    else if (same(name, "cuGetErrorName")) *function = (void *)cuGetErrorName;
    else if (same(name, "cuGetErrorString")) *function = (void *)cuGetErrorString;
    else if (same(name, "cuDriverGetVersion")) *function = (void *)cuDriverGetVersion;
    else if (same(name, "cuDeviceGetCount")) *function = (void *)cuDeviceGetCount;
    else if (same(name, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
    else *function = (void *)no_device;
    if (status) *status = SUCCESS;
    return SUCCESS;
}

/* The name and the four arguments of CUDA 11, which Legate 26.1 looks up by dlsym. */
CUresult cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
