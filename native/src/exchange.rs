//! Collective operations through the slots of a shared segment. No Python in here.
//!
//! Before all ranks arrive at an operation, each fills its window of slots. After the arrival the pieces flow: a rank
//! fills a slot again when all have taken its piece, makes its share of a piece when all have filled it, and takes a
//! piece when all have made it. A rank waits only if it can do none of these.
//!
//! E1  An operation that fits the window and makes nothing (barrier, vote) ends with its arrival: for all or none.
//! E2  Operations use two windows in turn: a rank that has passed an arrival knows that the operation before is over.

use crate::copies::{copy, copy_past_cache};
use crate::reduce::{reduce, width, Operation};
use crate::segment::{reached, Broken, Counter, Patience, Segment, HEAD_BYTES};

/// Bytes of a head that must be the same on all ranks.
const CHECKED_BYTES: usize = 32;
/// Up to this size every rank reduces the whole, which saves a wait.
const SMALL_BYTES: usize = 16 << 10;
/// From this size on a result does not fit the caches.
const LARGE_BYTES: usize = 8 << 20;
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
    patience: Patience<I>,
    stage: u32,
    /// Bytes of a piece for one rank, or for all ranks.
    room: usize,
    large: bool,
}

/// How far a rank is with the pieces of an operation.
struct Flow {
    base: u32,
    count: usize,
    window: usize,
    makes: bool,
    filled: usize,
    made: usize,
    taken: usize,
    all_filled: usize,
    all_made: usize,
    all_taken: usize,
    untold: usize,
}

impl<'a, I: FnMut() -> bool> Exchange<'a, I> {
    /// `None` if the head and the parts do not describe a valid operation.
    pub fn new(
        segment: Segment,
        head: &[u8],
        (sends, receives): (&'a [Part], &'a [Part]),
        patience: Patience<I>,
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
        let apart = kind == Kind::AllToAll || kind == Kind::ReduceScatter;
        let room = if apart { segment.slot / segment.size / LINE * LINE } else { segment.slot };
        let large = receives.iter().map(|part| part.1).sum::<usize>() >= LARGE_BYTES;
        let (element, stage) = (head[1], segment.stage(segment.rank));
        Some(Exchange { segment, kind, element, operation, sends, receives, patience, stage, room, large })
    }

    /// # Safety
    /// All parts are memory of the caller that nobody else writes until this returns.
    pub unsafe fn run(&mut self, head: &[u8]) -> Result<(), Broken> {
        if self.segment.is_aborted() {
            return Err(Broken::Aborted);
        }
        self.describe(head);
        let window = self.window();
        for index in 0..window.min(self.longest_given().div_ceil(self.room)) {
            self.fill(index);
        }
        self.segment.arrive(self.stage, &mut self.patience)?;
        let longest = self.agree()?;
        if self.is_small(longest) {
            self.reduce_all(longest);
            return Ok(());
        }
        let count = longest.div_ceil(self.room);
        self.flow(Flow::new(&self.segment, count, window, self.kind == Kind::AllReduce))
    }

    unsafe fn describe(&self, head: &[u8]) {
        let at = self.segment.head(self.segment.rank, self.stage);
        copy(head.as_ptr(), at, HEAD_BYTES);
        let lengths: *mut u64 = at.add(HEAD_BYTES).cast();
        let size = self.segment.size;
        for index in 0..size {
            let part = if self.sends.len() == size { index } else { 0 };
            lengths.add(index).write(self.sends[part].1 as u64);
            lengths.add(size + index).write(self.receives[part].1 as u64);
        }
        self.segment.note_head(self.stage);
    }

    unsafe fn length(&self, rank: usize, index: usize) -> u64 {
        let lengths: *const u64 = self.segment.head(rank, self.stage).add(HEAD_BYTES).cast();
        lengths.add(index).read()
    }

    /// Return the longest part of any rank, or a mismatch, which all ranks find alike.
    unsafe fn agree(&self) -> Result<usize, Broken> {
        let size = self.segment.size;
        let checked = |rank| std::slice::from_raw_parts(self.segment.head(rank, self.stage), CHECKED_BYTES);
        let mut longest = 0;
        for rank in 0..size {
            if checked(rank) != checked(0) {
                return Err(Broken::Mismatch);
            }
            for other in 0..size {
                let sent = self.length(rank, other);
                if sent != self.length(other, size + rank) {
                    return Err(Broken::Mismatch);
                }
                longest = longest.max(sent);
            }
        }
        Ok(longest as usize)
    }

    /// How many pieces may be filled and not yet taken: a broadcast also uses the idle slots of the other ranks.
    fn window(&self) -> usize {
        self.segment.window * if self.kind == Kind::Broadcast { self.segment.size } else { 1 }
    }

    fn longest_given(&self) -> usize {
        self.sends.iter().map(|part| part.1).max().unwrap_or(0)
    }

    fn is_small(&self, bytes: usize) -> bool {
        self.kind == Kind::AllReduce && bytes <= SMALL_BYTES.min(self.segment.slot)
    }

    unsafe fn reduce_all(&self, bytes: usize) {
        let filled = |rank| self.segment.slot_of(rank, self.stage, 0) as *const u8;
        let sources: Vec<*const u8> = (0..self.segment.size).map(filled).collect();
        reduce(self.element, self.operation, &sources, self.receives[0].0 as *mut u8, bytes);
    }

    unsafe fn flow(&mut self, mut flow: Flow) -> Result<(), Broken> {
        if self.longest_given() == 0 {
            flow.filled = flow.count;
        }
        if self.receives.iter().all(|part| part.1 == 0) {
            flow.taken = flow.count;
        }
        flow.publish(&self.segment);
        flow.tell(&self.segment);
        loop {
            if flow.can_take() {
                self.take(flow.taken);
                flow.taken += 1;
            } else if flow.can_make() {
                self.make(flow.made);
                flow.made += 1;
            } else if flow.can_fill() {
                self.fill(flow.filled);
                flow.filled += 1;
            } else if flow.look(&self.segment) {
                continue;
            } else {
                flow.tell(&self.segment);
                if flow.is_over() {
                    return Ok(());
                }
                let segment = &self.segment;
                segment.wait(|| flow.can_go_on(segment), &mut self.patience)?;
                continue;
            }
            flow.publish(&self.segment);
            flow.untold += 1;
            // Wake sleepers after a part of a window, or when this rank stops: not for every piece.
            if flow.untold > self.segment.window {
                flow.tell(&self.segment);
            }
        }
    }

    /// The range that rank `index` reduces of a piece of `bytes` bytes.
    fn share(&self, index: usize, bytes: usize) -> (usize, usize) {
        let step = bytes.div_ceil(self.segment.size).next_multiple_of(LINE);
        let from = (step * index).min(bytes);
        (from, (from + step).min(bytes) - from)
    }

    unsafe fn fill(&self, index: usize) {
        let (rank, size) = (self.segment.rank, self.segment.size);
        let slot = self.segment.slot_of(rank, self.stage, index);
        let longest_of = |parts: &[Part]| parts.iter().copied().max_by_key(|part| part.1).unwrap_or((0, 0));
        match self.kind {
            Kind::AllReduce => {
                let (from, bytes) = slice(self.sends[0], index, self.room);
                // A rank reads its own share from the tensor itself.
                let (at, own) =
                    if self.is_small(self.sends[0].1) { (bytes, 0) } else { self.share(rank, bytes) };
                copy(from as *const u8, slot, at);
                copy((from + at + own) as *const u8, slot.add(at + own), bytes - at - own);
            }
            Kind::Broadcast => {
                let (from, bytes) = slice(longest_of(self.sends), index, self.room);
                copy(from as *const u8, self.segment.slot_of(index % size, self.stage, index / size), bytes);
            }
            Kind::AllGather => {
                // All ranks get the same bytes; a group of one sends nothing.
                let others = self.sends.iter().enumerate().filter(|&(other, _)| other != rank);
                if let Some(&part) = others.map(|(_, part)| part).max_by_key(|part| part.1) {
                    let (from, bytes) = slice(part, index, self.room);
                    copy(from as *const u8, slot, bytes);
                }
            }
            Kind::AllToAll | Kind::ReduceScatter => {
                for other in (0..size).filter(|&other| other != rank) {
                    let (from, bytes) = slice(self.sends[other], index, self.room);
                    copy(from as *const u8, slot.add(other * self.room), bytes);
                }
            }
        }
    }

    /// Reduce this rank's share of a piece.
    unsafe fn make(&self, index: usize) {
        let rank = self.segment.rank;
        let (data, bytes) = slice(self.sends[0], index, self.room);
        let (from, own) = self.share(rank, bytes);
        let filled = |other| self.segment.slot_of(other, self.stage, index).add(from);
        let source = |other| if other == rank { (data + from) as *const u8 } else { filled(other) };
        let sources: Vec<*const u8> = (0..self.segment.size).map(source).collect();
        reduce(self.element, self.operation, &sources, filled(rank), own);
        let (out, _) = slice(self.receives[0], index, self.room);
        self.deliver(filled(rank), (out + from) as *mut u8, own);
    }

    unsafe fn take(&self, index: usize) {
        let (rank, size) = (self.segment.rank, self.segment.size);
        let slot = |other| self.segment.slot_of(other, self.stage, index) as *const u8;
        match self.kind {
            Kind::AllReduce => {
                let (out, bytes) = slice(self.receives[0], index, self.room);
                for other in (0..size).filter(|&other| other != rank) {
                    let (from, theirs) = self.share(other, bytes);
                    self.deliver(slot(other).add(from), (out + from) as *mut u8, theirs);
                }
            }
            Kind::ReduceScatter => {
                let (out, bytes) = slice(self.receives[rank], index, self.room);
                let own = slice(self.sends[rank], index, self.room).0 as *const u8;
                let source = |other| if other == rank { own } else { slot(other).add(rank * self.room) };
                let sources: Vec<*const u8> = (0..size).map(source).collect();
                reduce(self.element, self.operation, &sources, out as *mut u8, bytes);
            }
            Kind::Broadcast => {
                let taken = self.receives.iter().copied().max_by_key(|part| part.1).unwrap_or((0, 0));
                let (to, bytes) = slice(taken, index, self.room);
                let from = self.segment.slot_of(index % size, self.stage, index / size);
                self.deliver(from, to as *mut u8, bytes);
            }
            Kind::AllGather | Kind::AllToAll => {
                let place = if self.kind == Kind::AllToAll { rank * self.room } else { 0 };
                for other in 0..size {
                    let (to, bytes) = slice(self.receives[other], index, self.room);
                    let own = slice(self.sends[rank], index, self.room).0 as *const u8;
                    let from = if other == rank { own } else { slot(other).add(place) };
                    self.deliver(from, to as *mut u8, bytes);
                }
            }
        }
    }

    unsafe fn deliver(&self, from: *const u8, to: *mut u8, bytes: usize) {
        if self.large {
            copy_past_cache(from, to, bytes);
        } else {
            copy(from, to, bytes);
        }
    }
}

impl Flow {
    /// After the arrival: all windows are filled.
    fn new(segment: &Segment, count: usize, window: usize, makes: bool) -> Self {
        let filled = count.min(window);
        Flow {
            base: segment.count(segment.rank, Counter::Taken),
            count,
            window,
            makes,
            filled,
            made: 0,
            taken: 0,
            all_filled: filled,
            all_made: 0,
            all_taken: 0,
            untold: 0,
        }
    }

    fn can_fill(&self) -> bool {
        self.filled < self.count && self.filled < self.all_taken + self.window
    }

    fn can_make(&self) -> bool {
        self.makes && self.made < self.all_filled
    }

    fn can_take(&self) -> bool {
        self.taken < if self.makes { self.all_made } else { self.all_filled }
    }

    fn is_over(&self) -> bool {
        self.filled == self.count && self.taken == self.count && (!self.makes || self.made == self.count)
    }

    /// The minimum of a counter over all ranks; ranks that do not need it count as ready.
    fn least(&self, segment: &Segment, counter: Counter, known: usize) -> usize {
        let of = |rank| segment.count(rank, counter).wrapping_sub(self.base) as i32;
        known.max((0..segment.size).map(of).min().unwrap_or(0).max(0) as usize)
    }

    /// Read the others' counters again; true if this rank can do something now.
    fn look(&mut self, segment: &Segment) -> bool {
        self.all_filled = self.least(segment, Counter::Filled, self.all_filled);
        self.all_taken = self.least(segment, Counter::Taken, self.all_taken);
        if self.makes {
            self.all_made = self.least(segment, Counter::Made, self.all_made);
        }
        self.can_take() || self.can_make() || self.can_fill()
    }

    fn can_go_on(&self, segment: &Segment) -> bool {
        let behind = |counter, mine: usize| {
            let next = self.base.wrapping_add(mine as u32 + 1);
            (0..segment.size).all(|rank| reached(segment.count(rank, counter), next))
        };
        let source = if self.makes { Counter::Made } else { Counter::Filled };
        let free = |filled: usize| self.filled < self.count && behind(Counter::Taken, filled - self.window);
        (self.taken < self.count && behind(source, self.taken))
            || (self.makes && self.made < self.count && behind(Counter::Filled, self.made))
            || free(self.filled)
    }

    fn publish(&self, segment: &Segment) {
        let at = |done: usize| self.base.wrapping_add(done as u32);
        segment.set_count(Counter::Filled, at(self.filled));
        segment.set_count(Counter::Made, at(if self.makes { self.made } else { self.taken }));
        segment.set_count(Counter::Taken, at(self.taken));
    }

    fn tell(&mut self, segment: &Segment) {
        self.untold = 0;
        segment.ring();
    }
}

/// Piece `index` of a part that is moved `room` bytes at a time.
fn slice((address, bytes): Part, index: usize, room: usize) -> Part {
    let from = (index * room).min(bytes);
    (address + from, room.min(bytes - from))
}
