/* AMX: eight registers ("tiles") of up to 16 rows of 64 bytes, and products of bfloat16 tiles. */
#pragma once
#include "bfloat16.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

static int tiles_granted;

/* The operating system keeps the tiles' 8 KB per thread only for processes that ask. */
__attribute__((constructor)) static void ask_for_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    tiles_granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* Rows of the eight tiles, each of 64 bytes a row; 0: that tile is not used. What was in them is lost. _tile_release() comes after use:
 * others compute in this thread too. */
INLINE void shape_tiles(const int rows[8]) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.rows[i] = (uint8_t)rows[i];
        shapes.row_bytes[i] = rows[i] ? 64 : 0;
    }
    /* tile intrinsics tell the compiler only of a part of what they read */
    __asm__ volatile("" : : "m"(shapes) : "memory");
    _tile_loadconfig(&shapes);
}
#else
enum { tiles_granted = 0 };
#endif
