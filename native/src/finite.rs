//! Find numbers that are infinite or not a number. No Python in here.
//!
//! All bits of the exponent of such a number are set: adding its lowest bit to it carries into the bit of the sign.

/// Bytes between two looks at what was found.
const BLOCK: usize = 16 << 10;

/// Numbered as in `argosy.collective.request`.
pub fn width(element: u8) -> Option<usize> {
    [4, 8, 2, 2].get(element as usize).copied()
}

macro_rules! finder {
    ($name:ident, $word:ty) => {
        unsafe fn $name(address: usize, bytes: usize, exponent: $word) -> bool {
            const SIGN: $word = 1 << (<$word>::BITS - 1);
            let lowest = exponent & exponent.wrapping_neg();
            let count = bytes / size_of::<$word>();
            let start = address as *const $word;
            for from in (0..count).step_by(BLOCK / size_of::<$word>()) {
                let to = count.min(from + BLOCK / size_of::<$word>());
                let mut found: $word = 0;
                for index in from..to {
                    found |= (start.add(index).read_unaligned() & exponent).wrapping_add(lowest);
                }
                if found & SIGN != 0 {
                    return false;
                }
            }
            true
        }
    };
}
finder!(are_finite_16, u16);
finder!(are_finite_32, u32);
finder!(are_finite_64, u64);

/// Whether all numbers of a piece of memory are finite.
///
/// # Safety
/// The piece is memory that nobody writes until this returns.
pub unsafe fn are_finite(element: u8, (address, bytes): (usize, usize)) -> bool {
    match element {
        0 => are_finite_32(address, bytes, 0x7F80_0000),
        1 => are_finite_64(address, bytes, 0x7FF0_0000_0000_0000),
        2 => are_finite_16(address, bytes, 0x7C00),
        _ => are_finite_16(address, bytes, 0x7F80),
    }
}
