//! Element-wise reduction over ranks in a fixed tree. No Python in here.
//!
//! The tree is a function of the number of ranks alone: the left half of a range of ranks is the largest power
//! of two below its length. Half and bfloat16 are added in float32 and rounded once.

const BLOCK: usize = 512;

/// Numbered as in `argosy.collective.request`.
#[derive(Clone, Copy, PartialEq)]
pub enum Operation {
    Sum,
    Average,
    Product,
    Minimum,
    Maximum,
    And,
    Or,
    Xor,
}

impl Operation {
    pub fn from_code(code: u8) -> Option<Self> {
        use Operation::*;
        [Sum, Average, Product, Minimum, Maximum, And, Or, Xor].get(code as usize).copied()
    }
}

trait Element: Copy {
    type Wide: Copy + Default;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
}

macro_rules! plain {
    ($($kind:ty),*) => {$(
        impl Element for $kind {
            type Wide = $kind;
            #[inline(always)]
            fn widen(self) -> $kind { self }
            #[inline(always)]
            fn narrow(wide: $kind) -> $kind { wide }
        }
    )*};
}
plain!(f32, f64, i8, u8, i32, i64);

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Brain(u16);

impl Element for Brain {
    type Wide = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits((self.0 as u32) << 16)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        if wide.is_nan() {
            return Brain(0x7FC0);
        }
        Brain(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16)
    }
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Half(u16);

impl Element for Half {
    type Wide = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        let sign = ((self.0 & 0x8000) as u32) << 16;
        let (exponent, fraction) = ((self.0 >> 10) & 0x1F, (self.0 & 0x3FF) as u32);
        match exponent {
            0 => {
                let small = fraction as f32 * f32::from_bits(0x3380_0000); // 2^-24
                f32::from_bits(small.to_bits() | sign)
            }
            31 => f32::from_bits(sign | 0x7F80_0000 | (fraction << 13)),
            _ => f32::from_bits(sign | ((exponent as u32 + 112) << 23) | (fraction << 13)),
        }
    }
    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        let sign = ((bits >> 16) & 0x8000) as u16;
        let magnitude = bits & 0x7FFF_FFFF;
        if magnitude > 0x7F80_0000 {
            return Half(sign | 0x7E00);
        }
        if magnitude >= 0x4780_0000 {
            return Half(sign | 0x7C00);
        }
        if magnitude < 0x3880_0000 {
            // Below the smallest normal number: let the float unit round at the place of 2^-24.
            let rounded = f32::from_bits(magnitude) + f32::from_bits(0x3F00_0000);
            return Half(sign | (rounded.to_bits() - 0x3F00_0000) as u16);
        }
        let rounded = magnitude + 0x0FFF + ((magnitude >> 13) & 1);
        Half(sign | ((rounded - 0x3800_0000) >> 13) as u16)
    }
}

/// Fill `total` with the tree over `sources[..]`, elements `from..from + total.len()`.
#[inline(always)]
unsafe fn tree<T: Element>(
    sources: &[*const T],
    from: usize,
    total: &mut [T::Wide],
    combine: &impl Fn(T::Wide, T::Wide) -> T::Wide,
) {
    match sources {
        [only] => {
            for (i, slot) in total.iter_mut().enumerate() {
                *slot = only.add(from + i).read_unaligned().widen();
            }
        }
        [left, right] => {
            for (i, slot) in total.iter_mut().enumerate() {
                let (a, b) = (left.add(from + i).read_unaligned(), right.add(from + i).read_unaligned());
                *slot = combine(a.widen(), b.widen());
            }
        }
        _ => deep(sources, from, total, combine),
    }
}

unsafe fn deep<T: Element>(
    sources: &[*const T],
    from: usize,
    total: &mut [T::Wide],
    combine: &impl Fn(T::Wide, T::Wide) -> T::Wide,
) {
    let (left, right) = sources.split_at(sources.len().next_power_of_two() / 2);
    tree(left, from, total, combine);
    let mut other = [T::Wide::default(); BLOCK];
    let other = &mut other[..total.len()];
    tree(right, from, other, combine);
    for (slot, &value) in total.iter_mut().zip(other.iter()) {
        *slot = combine(*slot, value);
    }
}

unsafe fn run<T: Element>(
    sources: &[*const u8],
    out: *mut u8,
    count: usize,
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
    finish: impl Fn(T::Wide) -> T::Wide,
) {
    let sources: Vec<*const T> = sources.iter().map(|&source| source.cast()).collect();
    let out: *mut T = out.cast();
    let mut block = [T::Wide::default(); BLOCK];
    let mut from = 0;
    while from < count {
        let block = &mut block[..BLOCK.min(count - from)];
        tree(&sources, from, block, &combine);
        for (i, &value) in block.iter().enumerate() {
            out.add(from + i).write_unaligned(T::narrow(finish(value)));
        }
        from += block.len();
    }
}

macro_rules! floats {
    ($kind:ty, $wide:ty, $operation:expr, $sources:expr, $out:expr, $count:expr) => {{
        let divisor = $sources.len() as $wide;
        match $operation {
            Operation::Sum => run::<$kind>($sources, $out, $count, |a, b| a + b, |x| x),
            Operation::Average => run::<$kind>($sources, $out, $count, |a, b| a + b, |x| x / divisor),
            Operation::Product => run::<$kind>($sources, $out, $count, |a, b| a * b, |x| x),
            Operation::Minimum => {
                run::<$kind>($sources, $out, $count, |a, b| if a < b || a.is_nan() { a } else { b }, |x| x)
            }
            Operation::Maximum => {
                run::<$kind>($sources, $out, $count, |a, b| if a > b || a.is_nan() { a } else { b }, |x| x)
            }
            _ => return false,
        }
        true
    }};
}

macro_rules! integers {
    ($kind:ty, $operation:expr, $sources:expr, $out:expr, $count:expr) => {{
        match $operation {
            Operation::Sum => run::<$kind>($sources, $out, $count, |a, b| a.wrapping_add(b), |x| x),
            Operation::Product => run::<$kind>($sources, $out, $count, |a, b| a.wrapping_mul(b), |x| x),
            Operation::Minimum => run::<$kind>($sources, $out, $count, |a, b| a.min(b), |x| x),
            Operation::Maximum => run::<$kind>($sources, $out, $count, |a, b| a.max(b), |x| x),
            Operation::And => run::<$kind>($sources, $out, $count, |a, b| a & b, |x| x),
            Operation::Or => run::<$kind>($sources, $out, $count, |a, b| a | b, |x| x),
            Operation::Xor => run::<$kind>($sources, $out, $count, |a, b| a ^ b, |x| x),
            Operation::Average => return false,
        }
        true
    }};
}

/// Bytes of an element of the type numbered `code`, if it can be reduced.
pub fn width(code: u8) -> Option<usize> {
    [4, 8, 2, 2, 1, 1, 4, 8].get(code as usize).copied()
}

/// Reduce `bytes` bytes of each source into `out`; false if the type does not have the operation.
///
/// # Safety
/// All pointers are good for `bytes` bytes; `out` may be one of the sources, else it overlaps none.
pub unsafe fn reduce(
    code: u8,
    operation: Operation,
    sources: &[*const u8],
    out: *mut u8,
    bytes: usize,
) -> bool {
    let Some(width) = width(code) else { return false };
    let count = bytes / width;
    match code {
        0 => floats!(f32, f32, operation, sources, out, count),
        1 => floats!(f64, f64, operation, sources, out, count),
        2 => floats!(Half, f32, operation, sources, out, count),
        3 => floats!(Brain, f32, operation, sources, out, count),
        4 => integers!(i8, operation, sources, out, count),
        5 => integers!(u8, operation, sources, out, count),
        6 => integers!(i32, operation, sources, out, count),
        _ => integers!(i64, operation, sources, out, count),
    }
}
