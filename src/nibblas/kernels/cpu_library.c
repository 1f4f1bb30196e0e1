/* Which instructions this machine and its system offer, and what the library was made of. */
#include "cpu_common.h"

#if defined(NIBBLAS_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef NIBBLAS_X86
/* AMX state must be asked for, once a process (arch_prctl ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
static int may_use_amx(void) {
#ifdef __linux__
    return !syscall(SYS_arch_prctl, 0x1023, 18);
#else
    return 0;
#endif
}
#endif

/* The best tier here. */
EXPORT int nibblas_tier(void) {
#ifdef NIBBLAS_X86
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")))
        return PORTABLE;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
          __builtin_cpu_supports("avx512vnni")))
        return AVX2;
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && may_use_amx() ? AMX : AVX512;
#else
    return PORTABLE;
#endif
}

/* Read from the file, without loading it, to see whether it was made of the sources at hand. */
#ifndef NIBBLAS_DIGEST
#define NIBBLAS_DIGEST "none"
#endif
EXPORT const char nibblas_digest[] = "nibblas-sources:" NIBBLAS_DIGEST;

EXPORT int nibblas_has_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
