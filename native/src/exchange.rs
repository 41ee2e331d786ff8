//! Collective operations through the buffers of a shared segment. No Python in here.
//!
//! Every operation is a row of stages with an arrival of all ranks after each. In stage s a rank fills its buffer
//! s mod 3 with piece s, works on what the others filled in stage s - 1, and takes what was made of stage s - 2:
//! three buffers are enough for one arrival per piece, also from one operation to the next.

use crate::reduce::{reduce, width, Operation};
use crate::segment::{Broken, Segment, HEAD_BYTES};
use std::ptr::copy;
use std::time::Instant;

/// Bytes of a head that must be the same on all ranks.
const CHECKED_BYTES: usize = 32;
/// Up to here every rank reduces all of it, and there is one arrival instead of three.
const SMALL_BYTES: usize = 16 << 10;
const LINE: usize = 64;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    AllReduce,
    ReduceScatter,
    AllToAll,
    AllGather,
    Broadcast,
}

pub type Part = (usize, usize);

pub struct Exchange<'a, I: FnMut() -> bool> {
    segment: Segment,
    kind: Kind,
    element: u8,
    operation: Operation,
    sends: &'a [Part],
    receives: &'a [Part],
    deadline: Option<Instant>,
    interrupted: I,
}

impl<'a, I: FnMut() -> bool> Exchange<'a, I> {
    /// `None` if the head or the parts are no operation that exists.
    pub fn new(
        segment: Segment,
        head: &[u8],
        (sends, receives): (&'a [Part], &'a [Part]),
        deadline: Option<Instant>,
        interrupted: I,
    ) -> Option<Self> {
        const KINDS: [Kind; 5] =
            [Kind::AllReduce, Kind::ReduceScatter, Kind::AllToAll, Kind::AllGather, Kind::Broadcast];
        let kind = *KINDS.get(*head.first()? as usize)?;
        let count = if kind == Kind::AllReduce { 1 } else { segment.size };
        if head.len() != HEAD_BYTES || sends.len() != count || receives.len() != count {
            return None;
        }
        let reduces = kind == Kind::AllReduce || kind == Kind::ReduceScatter;
        let operation = Operation::from_code(head[2])?;
        if reduces && width(head[1]).is_none() {
            return None;
        }
        let element = head[1];
        Some(Exchange { segment, kind, element, operation, sends, receives, deadline, interrupted })
    }

    /// # Safety
    /// All parts are memory of the caller that nobody else writes until this returns.
    pub unsafe fn run(&mut self, head: &[u8]) -> Result<(), Broken> {
        if self.segment.is_aborted() {
            return Err(Broken::Aborted);
        }
        let first = self.segment.stage(self.segment.rank);
        self.describe(head, first);
        match self.kind {
            Kind::AllReduce => self.all_reduce(first),
            Kind::Broadcast => self.broadcast(first),
            _ => self.move_parts(first),
        }
    }

    unsafe fn describe(&self, head: &[u8], stage: u32) {
        let at = self.segment.head(self.segment.rank, stage);
        copy(head.as_ptr(), at, HEAD_BYTES);
        let lengths: *mut u64 = at.add(HEAD_BYTES).cast();
        let size = self.segment.size;
        for index in 0..size {
            let part = if self.sends.len() == size { index } else { 0 };
            lengths.add(index).write(self.sends[part].1 as u64);
            lengths.add(size + index).write(self.receives[part].1 as u64);
        }
        self.segment.note_head(stage);
    }

    unsafe fn length(&self, rank: usize, stage: u32, index: usize) -> u64 {
        let lengths: *const u64 = self.segment.head(rank, stage).add(HEAD_BYTES).cast();
        lengths.add(index).read()
    }

    /// The longest part of any rank, or the finding, the same on all ranks, that they do not want the same.
    unsafe fn agree(&self, stage: u32) -> Result<usize, Broken> {
        let size = self.segment.size;
        let checked = |rank| std::slice::from_raw_parts(self.segment.head(rank, stage), CHECKED_BYTES);
        let mut longest = 0;
        for rank in 0..size {
            if checked(rank) != checked(0) {
                return Err(Broken::Mismatch);
            }
            for other in 0..size {
                let sent = self.length(rank, stage, other);
                if sent != self.length(other, stage, size + rank) {
                    return Err(Broken::Mismatch);
                }
                longest = longest.max(sent);
            }
        }
        Ok(longest as usize)
    }

    fn arrive(&mut self, stage: u32) -> Result<(), Broken> {
        self.segment.arrive(stage, self.deadline, &mut self.interrupted)
    }

    /// Where rank `index` works in a piece of `bytes` bytes.
    fn share(&self, index: usize, bytes: usize) -> (usize, usize) {
        let step = bytes.div_ceil(self.segment.size).next_multiple_of(LINE);
        let from = (step * index).min(bytes);
        (from, (from + step).min(bytes) - from)
    }

    unsafe fn all_reduce(&mut self, first: u32) -> Result<(), Broken> {
        let (data, bytes) = (self.sends[0].0 as *mut u8, self.sends[0].1);
        let out = self.receives[0].0 as *mut u8;
        let (rank, size) = (self.segment.rank, self.segment.size);
        if bytes <= SMALL_BYTES.min(self.segment.chunk) {
            copy(data, self.segment.buffer(rank, first), bytes);
            self.arrive(first)?;
            self.agree(first)?;
            let sources: Vec<*const u8> =
                (0..size).map(|r| self.segment.buffer(r, first) as *const u8).collect();
            reduce(self.element, self.operation, &sources, out, bytes);
            return Ok(());
        }
        let chunk = self.segment.chunk;
        let count = bytes.div_ceil(chunk);
        let piece = |index: usize| (index * chunk, chunk.min(bytes - index * chunk));
        let mut sources = vec![std::ptr::null::<u8>(); size];
        for step in 0..count + 2 {
            let stage = first.wrapping_add(step as u32);
            if step < count {
                let (at, length) = piece(step);
                let (from, own) = self.share(rank, length);
                let buffer = self.segment.buffer(rank, stage);
                // Its own share a rank reads from the tensor itself.
                copy(data.add(at), buffer, from);
                copy(data.add(at + from + own), buffer.add(from + own), length - from - own);
            }
            if step >= 1 && step <= count {
                let (at, length) = piece(step - 1);
                let (from, own) = self.share(rank, length);
                for (other, source) in sources.iter_mut().enumerate() {
                    let filled = self.segment.buffer(other, stage.wrapping_sub(1));
                    *source = if other == rank { data.add(at + from) } else { filled.add(from) };
                }
                let made = self.segment.buffer(rank, stage.wrapping_sub(1)).add(from);
                reduce(self.element, self.operation, &sources, made, own);
                copy(made, out.add(at + from), own);
            }
            if step >= 2 {
                let (at, length) = piece(step - 2);
                for other in (0..size).filter(|&other| other != rank) {
                    let (from, theirs) = self.share(other, length);
                    copy(
                        self.segment.buffer(other, stage.wrapping_sub(2)).add(from),
                        out.add(at + from),
                        theirs,
                    );
                }
            }
            if step <= count {
                self.arrive(stage)?;
            }
            if step == 0 {
                self.agree(first)?;
            }
        }
        Ok(())
    }

    /// The operations in which each part goes from one rank to one rank, or to all.
    unsafe fn move_parts(&mut self, first: u32) -> Result<(), Broken> {
        let (rank, size) = (self.segment.rank, self.segment.size);
        let shared = self.kind == Kind::AllGather;
        let room = if shared { self.segment.chunk } else { self.segment.chunk / size / LINE * LINE };
        self.fill(first, 0, room);
        self.arrive(first)?;
        let longest = self.agree(first)?;
        let count = longest.div_ceil(room);
        for step in 1..=count {
            let stage = first.wrapping_add(step as u32);
            if step < count {
                self.fill(stage, step, room);
            }
            if self.kind == Kind::ReduceScatter {
                self.take_reduced(stage.wrapping_sub(1), step - 1, room);
            } else {
                for other in 0..size {
                    let (to, bytes) = slice(self.receives[other], step - 1, room);
                    let from = match other == rank {
                        true => slice(self.sends[rank], step - 1, room).0 as *const u8,
                        false => self.segment.buffer(other, stage.wrapping_sub(1)).add(if shared {
                            0
                        } else {
                            rank * room
                        }),
                    };
                    copy(from, to as *mut u8, bytes);
                }
            }
            if step < count {
                self.arrive(stage)?;
            }
        }
        Ok(())
    }

    /// The root fills the buffers of all ranks, which are idle: fewer arrivals for as many bytes.
    unsafe fn broadcast(&mut self, first: u32) -> Result<(), Broken> {
        let (chunk, size) = (self.segment.chunk, self.segment.size);
        let longest_of = |parts: &[Part]| parts.iter().copied().max_by_key(|part| part.1).unwrap_or((0, 0));
        let (given, taken) = (longest_of(self.sends), longest_of(self.receives));
        let fill = |segment: &Segment, stage: u32, step: usize| {
            for index in 0..size {
                let (from, bytes) = slice(given, step * size + index, chunk);
                copy(from as *const u8, segment.buffer(index, stage), bytes);
            }
        };
        fill(&self.segment, first, 0);
        self.arrive(first)?;
        let count = self.agree(first)?.div_ceil(chunk * size);
        for step in 1..=count {
            let stage = first.wrapping_add(step as u32);
            if step < count {
                fill(&self.segment, stage, step);
            }
            for index in 0..size {
                let (to, bytes) = slice(taken, (step - 1) * size + index, chunk);
                copy(self.segment.buffer(index, stage.wrapping_sub(1)), to as *mut u8, bytes);
            }
            if step < count {
                self.arrive(stage)?;
            }
        }
        Ok(())
    }

    unsafe fn fill(&self, stage: u32, step: usize, room: usize) {
        let (rank, size) = (self.segment.rank, self.segment.size);
        let buffer = self.segment.buffer(rank, stage);
        if self.kind == Kind::AllGather {
            // What goes to one goes to all; nothing is copied for a group of one, or by who only receives.
            if let Some(&part) =
                (0..size).filter(|&other| other != rank).map(|other| &self.sends[other]).max_by_key(|p| p.1)
            {
                let (from, bytes) = slice(part, step, room);
                copy(from as *const u8, buffer, bytes);
            }
            return;
        }
        for other in (0..size).filter(|&other| other != rank) {
            let (from, bytes) = slice(self.sends[other], step, room);
            copy(from as *const u8, buffer.add(other * room), bytes);
        }
    }

    unsafe fn take_reduced(&self, stage: u32, step: usize, room: usize) {
        let (rank, size) = (self.segment.rank, self.segment.size);
        let (out, bytes) = slice(self.receives[rank], step, room);
        let own = slice(self.sends[rank], step, room).0 as *const u8;
        let source = |other: usize| self.segment.buffer(other, stage).add(rank * room) as *const u8;
        let sources: Vec<*const u8> =
            (0..size).map(|other| if other == rank { own } else { source(other) }).collect();
        reduce(self.element, self.operation, &sources, out as *mut u8, bytes);
    }
}

/// Piece `step` of a part that is moved `room` bytes at a time.
fn slice((address, bytes): Part, step: usize, room: usize) -> Part {
    let from = (step * room).min(bytes);
    (address + from, room.min(bytes - from))
}
