// One bit for each element of a mask, and the elements again, as bits.py describes them. The first and the last element
// of the table are the two contents of an element. Of one-byte elements, all but 0 are ones. Buffers begin at multiples
// of 16 bytes.

typedef unsigned char Byte;
typedef unsigned short Half;
typedef unsigned int Word;

const int LAST = 8 * 256 - 1;

// The bits of the elements in four bytes. Of bytes: no two products have the same place, so nothing is carried.
template <typename Element> __device__ Word narrowed(Word word, Word one) {
    if (sizeof(Element) == 1) return ((((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) >> 7 & 0x01010101) * 0x01020408 >> 24;
    if (sizeof(Element) == 2) return ((word & 0xffff) == one) | ((word >> 16) == one) << 1;
    return word == one;
}

// Four bytes with 1 in each element whose bit is set, and 0 in the others.
template <typename Element> __device__ Word spread(Word bits) {
    if (sizeof(Element) == 1) return (bits & 15) * 0x00204081 & 0x01010101;
    return sizeof(Element) == 2 ? (bits & 1) | (bits & 2) << 15 : bits & 1;
}

// Each thread makes the bits of 16 elements.
template <typename Element>
__device__ void narrow(const Element *whole, long long count, Byte *bits, const Element *table) {
    const int each = 4 / sizeof(Element);
    const long long index = blockIdx.x * (long long)blockDim.x + threadIdx.x, first = 16 * index;
    const Word one = table[LAST];
    Word made = 0;
    if (count - first >= 16) {
        for (int at = 0; at < (int)sizeof(Element); ++at) {
            const uint4 read = reinterpret_cast<const uint4 *>(whole + first)[at];
            const Word low = narrowed<Element>(read.x, one) | narrowed<Element>(read.y, one) << each;
            const Word high = narrowed<Element>(read.z, one) | narrowed<Element>(read.w, one) << each;
            made |= (low | high << 2 * each) << 4 * each * at;
        }
        reinterpret_cast<Half *>(bits)[index] = made;
        return;
    }
    for (int at = 0; at < count - first; ++at) made |= (narrowed<Element>(whole[first + at], one) & 1) << at;
    if (count > first) bits[2 * index] = made;
    if (count > first + 8) bits[2 * index + 1] = made >> 8;
}

// Each thread writes 16 bytes of elements.
template <typename Element>
__device__ void widen(const Byte *bits, long long count, Element *whole, const Element *table) {
    const int each = 4 / sizeof(Element), held = 4 * each;
    const long long index = blockIdx.x * (long long)blockDim.x + threadIdx.x, first = held * index;
    const Word zero = table[0], one = table[LAST];
    if (count - first >= held) {
        const Word read = held == 16 ? reinterpret_cast<const Half *>(bits)[index] : bits[first / 8] >> first % 8;
        const Word zeros = spread<Element>(15) * zero, other = zero ^ one;
        uint4 made;
        made.x = zeros ^ spread<Element>(read) * other;
        made.y = zeros ^ spread<Element>(read >> each) * other;
        made.z = zeros ^ spread<Element>(read >> 2 * each) * other;
        made.w = zeros ^ spread<Element>(read >> 3 * each) * other;
        reinterpret_cast<uint4 *>(whole)[index] = made;
        return;
    }
    for (long long at = first; at < count; ++at) whole[at] = bits[at / 8] >> at % 8 & 1 ? one : zero;
}

#define KERNEL(name, From, Into, Element) extern "C" __global__ void \
    name(const From *from, long long count, Into *into, const Element *table)

KERNEL(narrow_1, Byte, Byte, Byte) { narrow(from, count, into, table); }
KERNEL(narrow_2, Half, Byte, Half) { narrow(from, count, into, table); }
KERNEL(narrow_4, Word, Byte, Word) { narrow(from, count, into, table); }
KERNEL(widen_1, Byte, Byte, Byte) { widen(from, count, into, table); }
KERNEL(widen_2, Byte, Half, Half) { widen(from, count, into, table); }
KERNEL(widen_4, Byte, Word, Word) { widen(from, count, into, table); }
