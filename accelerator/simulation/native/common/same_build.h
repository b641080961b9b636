/* Whether two libraries were compiled from the same headers in interface/. C and C++ include this file. */
#ifndef ACCELERATOR_SIM_SAME_BUILD_H
#define ACCELERATOR_SIM_SAME_BUILD_H

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "interface/boundary.h"

/* Returns NULL, or what is wrong with another library and what to do. The text lasts until the thread's next call. */
static inline const char *find_other_build(const char *their_boundary, const void *their_address)
{
    static const char own_boundary[] = SIM_BOUNDARY;
    static __thread char text[1024];
    Dl_info own, theirs;
    if (their_boundary && strcmp(their_boundary, own_boundary) == 0)
        return NULL;
    dladdr((const void *)own_boundary, &own);
    dladdr(their_address, &theirs);
    snprintf(text, sizeof text,
             "%s and %s were compiled from different sources: delete their folders, and the next start, or simulate --build,"
             " compiles both again",
             own.dli_fname, theirs.dli_fname);
    return text;
}

#endif
