/* Memory of tensors between guard pages, for the fuzzer of graphs; loaded with LD_PRELOAD.
 *
 * torch takes the memory of every tensor with posix_memalign. Here each such block ends at a page that may not be
 * touched, and starts behind one: a kernel that reads or writes past the end dies at once. A freed block may never be
 * touched again. Fresh blocks are filled with a byte of choice, so that a result that depends on it is found by running
 * twice. What lies between the end of a block and the guard page, for alignment, is checked when it is freed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *pointer);

#define PAGE 4096UL
#define ARENA (1UL << 37)

static char *arena;
static size_t *sizes; /* of the block that begins in each page */
static size_t next_page = 1;
static size_t live, peak, limit = SIZE_MAX, refused, damaged;
static int enabled;
static unsigned char fill;

static void *reserve(size_t size, int protection) {
    void *found = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

int guard_enable(int on) {
    if (on && arena == NULL) {
        arena = reserve(ARENA, PROT_NONE);
        sizes = reserve(ARENA / PAGE * sizeof *sizes, PROT_READ | PROT_WRITE);
        if (arena == NULL || sizes == NULL) return -1;
    }
    enabled = on;
    return 0;
}
void guard_fill(int byte) { fill = (unsigned char)byte; }
void guard_limit(size_t bytes) { limit = bytes; }
void guard_forget_peak(void) { peak = live; refused = 0; }
size_t guard_live(void) { return live; }
size_t guard_peak(void) { return peak; }
size_t guard_refused(void) { return refused; }
size_t guard_damaged(void) { return damaged; }

int posix_memalign(void **pointer, size_t alignment, size_t size) {
    if (!enabled || size == 0) {
        *pointer = __libc_memalign(alignment, size);
        return *pointer == NULL ? ENOMEM : 0;
    }
    size_t span = (size + alignment - 1) & ~(alignment - 1), pages = (span + PAGE - 1) / PAGE;
    if (span < size || alignment > PAGE || live + size > limit || live + size < live
        || next_page + pages + 1 > ARENA / PAGE) {
        refused = refused > size ? refused : size;
        return ENOMEM;
    }
    char *base = arena + next_page * PAGE, *block = base + pages * PAGE - span;
    if (mprotect(base, pages * PAGE, PROT_READ | PROT_WRITE) != 0) return ENOMEM;
    memset(base, fill, pages * PAGE);
    sizes[next_page] = size;
    next_page += pages + 1;
    live += size;
    if (live > peak) peak = live;
    *pointer = block;
    return 0;
}

void free(void *pointer) {
    char *block = pointer;
    if (arena == NULL || block < arena || block >= arena + ARENA) {
        __libc_free(pointer);
        return;
    }
    size_t page = (size_t)(block - arena) / PAGE, size = sizes[page];
    if (size == 0) { /* freed twice, or never given out */
        damaged++;
        return;
    }
    char *base = arena + page * PAGE, *end = block + size;
    size_t pages = ((size_t)(end - base) + PAGE - 1) / PAGE;
    unsigned char expected = block > base ? (unsigned char)*base : 0;
    for (char *byte = base; byte < block; byte++) damaged += (unsigned char)*byte != expected;
    if (end < base + pages * PAGE) {
        expected = (unsigned char)base[pages * PAGE - 1];
        for (char *byte = end; byte < base + pages * PAGE; byte++) damaged += (unsigned char)*byte != expected;
    }
    sizes[page] = 0;
    live -= size;
    madvise(base, pages * PAGE, MADV_DONTNEED);
    mprotect(base, pages * PAGE, PROT_NONE);
}
