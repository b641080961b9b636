/* Names the nodes of a simulated cluster node0, node1 and so on, and gives each an address of its own on this host.
 *
 * torchrun compares names and addresses to decide which node has the store of a rendezvous. */
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interface/settings.h"

enum { NAME_SIZE = sizeof "node2147483647" };

static int read_number(const char *text)
{
    return text == NULL ? 0 : atoi(text);
}

/* Write the address of a node. Return false if the name is not that of a node. */
static bool find_address(const char *name, char address[static NI_MAXHOST])
{
    char expected[NAME_SIZE];
    if (name == NULL || strncmp(name, "node", 4) != 0)
        return false;
    int node = atoi(name + 4);
    snprintf(expected, sizeof expected, "node%d", node);
    if (strcmp(name, expected) != 0 || node < 0 || node >= read_number(getenv(SETTING_NODES)))
        return false;
    snprintf(address, NI_MAXHOST, "127.0.0.%d", node + 1);
    return true;
}

__attribute__((visibility("default"))) int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                                                       struct addrinfo **result)
{
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    *(void **)&real = dlsym(RTLD_NEXT, "getaddrinfo");
    char address[NI_MAXHOST];
    bool is_numeric = hints != NULL && (hints->ai_flags & AI_NUMERICHOST) != 0;
    return real(!is_numeric && find_address(name, address) ? address : name, service, hints, result);
}

__attribute__((visibility("default"))) int gethostname(char *name, size_t size)
{
    if (getenv(SETTING_NODES) == NULL) {
        int (*real)(char *, size_t);
        *(void **)&real = dlsym(RTLD_NEXT, "gethostname");
        return real(name, size);
    }
    if ((size_t)snprintf(name, size, "node%d", read_number(getenv(SETTING_NODE))) < size)
        return 0;
    errno = ENAMETOOLONG;
    return -1;
}
