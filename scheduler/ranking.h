// Descending order of many numbers: what numpy's sort and stable argsort give.

#pragma once

#include <stdint.h>
#include <string.h>

// Positive floats sort as their bits do. Descending; scratch [n].
static void sort_descending(float *values, float *scratch, int64_t n)
{
    if (n <= 48) {
        for (int64_t i = 1; i < n; i++) {
            float value = values[i];
            int64_t j = i;
            for (; j > 0 && values[j - 1] < value; j--) values[j] = values[j - 1];
            values[j] = value;
        }
        return;
    }
    uint32_t *from = (uint32_t *)values, *to = (uint32_t *)scratch;
    int64_t counts[4][256];
    memset(counts, 0, sizeof counts);
    for (int64_t i = 0; i < n; i++)
        for (int digit = 0; digit < 4; digit++) counts[digit][from[i] >> (8 * digit) & 255]++;
    for (int digit = 0; digit < 4; digit++) {
        int64_t place = 0;
        int sorted = 0;
        for (int key = 255; key >= 0; key--) {
            int64_t count = counts[digit][key];
            sorted |= count == n;
            counts[digit][key] = place;
            place += count;
        }
        if (sorted) continue; // all have the same digit
        for (int64_t i = 0; i < n; i++) to[counts[digit][from[i] >> (8 * digit) & 255]++] = from[i];
        uint32_t *other = from;
        from = to, to = other;
    }
    if (from != (uint32_t *)values) memcpy(values, from, n * sizeof *values);
}

// order [n]: indices by descending value, equal ones as they come. scratch [n].
static void rank_descending(const double *values, int64_t *order, int64_t *scratch, int64_t n)
{
    for (int64_t i = 0; i < n; i++) order[i] = i;
    int64_t run = n < 16 ? n : 16;
    for (int64_t start = 0; run && start < n; start += run) {
        int64_t end = start + run < n ? start + run : n;
        for (int64_t i = start + 1; i < end; i++) {
            int64_t moved = order[i], j = i;
            for (; j > start && values[order[j - 1]] < values[moved]; j--) order[j] = order[j - 1];
            order[j] = moved;
        }
    }
    int64_t *from = order, *to = scratch;
    for (; run && run < n; run *= 2) {
        for (int64_t start = 0; start < n; start += 2 * run) {
            int64_t middle = start + run < n ? start + run : n, end = start + 2 * run < n ? start + 2 * run : n;
            int64_t left = start, right = middle;
            for (int64_t i = start; i < end; i++)
                to[i] = left < middle && (right >= end || values[from[left]] >= values[from[right]]) ? from[left++]
                                                                                                     : from[right++];
        }
        int64_t *other = from;
        from = to, to = other;
    }
    if (from != order) memcpy(order, from, n * sizeof *order);
}
