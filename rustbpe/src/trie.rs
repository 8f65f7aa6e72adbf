//! Finds the longest token at a place of a text, in one step per byte.
//!
//! The trie is one array. A node's child for a byte is at the node's base XOR the byte, and the child stores its
//! parent. So all children of a node are in one block of 256 entries, and nodes share the entries that others leave
//! free.

/// Stands for no token and for no node.
pub const NONE: u32 = u32::MAX;
const ROOT: u32 = 0;
/// The root's parent: the root is not free, and it is no node's child.
const NOT_FREE: u32 = NONE - 1;
const BLOCK: u32 = 256;
/// In a base, marks a node without children. The remaining bits are the token that ends there, instead of a base.
const LEAF: u32 = 1 << 30;
/// How many of the newest blocks are searched for room for a node's only child, and for room for several children.
/// Only children fill what the others leave.
const OPEN_BLOCKS: (u32, u32) = (8, 2);

/// In a base, marks that a token ends at this node.
const TOKEN: u32 = 1 << 31;

#[derive(Clone, Copy)]
struct Node {
    /// The base, with the marks TOKEN and LEAF.
    base: u32,
    parent: u32,
}

const FREE: Node = Node { base: 0, parent: NONE };

pub struct Trie {
    nodes: Vec<Node>,
    /// For each node that has children: the token that ends there. Separate from the nodes, because nodes are read for
    /// each byte and this only once.
    tokens: Vec<u32>,
}

/// The nodes while they are being placed.
struct Room {
    nodes: Vec<Node>,
    /// One bit per node: whether it is free.
    free: Vec<u64>,
}

/// A token while the trie is built. Tokens sort by `front`, then by the rest of their bytes.
#[derive(Clone, Copy)]
struct Entry {
    /// The first eight bytes, the first of them in the highest place, padded with zeros.
    front: u64,
    id: u32,
    length: u32,
}

/// A node whose children are not placed yet.
struct Waiting {
    node: u32,
    depth: usize,
    /// The tokens below it.
    first: usize,
    end: usize,
    /// The longest token that ends above it.
    above: u32,
}

impl Trie {
    /// Build the trie, and find for each token the longest other token that it begins with, or NONE. `tokens[i]` are
    /// the bytes of token i, which must not be empty. Of equal tokens, the trie has the first, and the others begin
    /// with it.
    pub fn new(tokens: &[&[u8]]) -> (Self, Vec<u32>) {
        let sorted = sorted(tokens);
        let byte = |entry: Entry, depth: usize| match depth {
            0..8 => (entry.front >> (56 - 8 * depth)) as u8,
            _ => tokens[entry.id as usize][depth],
        };
        let mut room = Room { nodes: Vec::new(), free: Vec::new() };
        let (mut ending, mut shorter) = (Vec::new(), vec![NONE; tokens.len()]);
        room.add_block();
        room.take(ROOT, NOT_FREE);
        let mut waiting = vec![Waiting { node: ROOT, depth: 0, first: 0, end: sorted.len(), above: NONE }];
        let (mut bytes, mut starts) = (Vec::new(), Vec::new());
        while let Some(Waiting { node, depth, mut first, end, mut above }) = waiting.pop() {
            let before = first;
            while first < end && sorted[first].length as usize == depth {
                let id = sorted[first].id;
                shorter[id as usize] = above;
                if first == before {
                    above = id;
                }
                first += 1;
            }
            if first == end {
                room.nodes[node as usize].base = TOKEN | LEAF | if above == NONE { 0 } else { above };
                continue;
            }
            bytes.clear();
            starts.clear();
            for (index, &entry) in sorted[first..end].iter().enumerate() {
                let byte = byte(entry, depth);
                if bytes.last() != Some(&byte) {
                    bytes.push(byte);
                    starts.push(first + index);
                }
            }
            starts.push(end);
            let base = room.base_for(&bytes);
            room.nodes[node as usize].base = base;
            if first > before {
                room.nodes[node as usize].base |= TOKEN;
                if ending.len() < room.nodes.len() {
                    ending.resize(room.nodes.len(), NONE);
                }
                ending[node as usize] = above;
            }
            for (&byte, range) in bytes.iter().zip(starts.windows(2)) {
                let child = base ^ u32::from(byte);
                room.take(child, node);
                waiting.push(Waiting { node: child, depth: depth + 1, first: range[0], end: range[1], above });
            }
        }
        (Self { nodes: room.nodes, tokens: ending }, shorter)
    }

    /// The longest token that begins at `start`, and where it ends. NONE if no token fits.
    #[inline]
    pub fn longest(&self, text: &[u8], start: usize) -> (u32, usize) {
        let (mut node, mut base) = (ROOT, self.nodes[ROOT as usize].base);
        let (mut found, mut found_base, mut end) = (NONE, 0, start);
        for (at, &byte) in text.iter().enumerate().skip(start) {
            let next = base ^ u32::from(byte);
            let Some(child) = self.nodes.get(next as usize) else { break };
            if child.parent != node {
                break;
            }
            if child.base & TOKEN != 0 {
                (found, found_base, end) = (next, child.base, at + 1);
            }
            (node, base) = (next, child.base & !TOKEN);
        }
        if found_base & LEAF != 0 {
            return (found_base & (LEAF - 1), end);
        }
        (self.tokens.get(found as usize).copied().unwrap_or(NONE), end)
    }
}

/// The tokens in the order of their bytes; equal ones in the order of their ids.
fn sorted(tokens: &[&[u8]]) -> Vec<Entry> {
    let entry = |(id, token): (u32, &&[u8])| {
        let mut front = [0; 8];
        let length = token.len().min(8);
        front[..length].copy_from_slice(&token[..length]);
        Entry { front: u64::from_be_bytes(front), id, length: token.len() as u32 }
    };
    let mut entries: Vec<Entry> = (0..).zip(tokens).map(entry).collect();
    let bytes = |entry: &Entry| (tokens[entry.id as usize], entry.id);
    entries.sort_unstable_by(|one, two| one.front.cmp(&two.front).then_with(|| bytes(one).cmp(&bytes(two))));
    entries
}

impl Room {
    fn add_block(&mut self) {
        self.nodes.resize(self.nodes.len() + BLOCK as usize, FREE);
        self.free.resize(self.nodes.len() / 64, u64::MAX);
    }

    fn take(&mut self, node: u32, parent: u32) {
        self.nodes[node as usize].parent = parent;
        self.free[node as usize / 64] &= !(1 << (node % 64));
    }

    /// A base for which the entries of all these children are free.
    fn base_for(&mut self, bytes: &[u8]) -> u32 {
        let end = self.nodes.len() as u32;
        let is_free = |node: u32| self.free[node as usize / 64] >> (node % 64) & 1 != 0;
        let open = if bytes.len() == 1 { OPEN_BLOCKS.0 } else { OPEN_BLOCKS.1 };
        for word in end.saturating_sub(open * BLOCK) / 64..end / 64 {
            let mut free = self.free[word as usize];
            while free != 0 {
                let base = (64 * word + free.trailing_zeros()) ^ u32::from(bytes[0]);
                if bytes[1..].iter().all(|&byte| is_free(base ^ u32::from(byte))) {
                    return base;
                }
                free &= free - 1;
            }
        }
        self.add_block();
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{random_text, Random};

    #[test]
    fn it_finds_the_longest_token_on_random_vocabularies() {
        for seed in 0..100 {
            let mut random = Random::new(seed);
            let alphabet = ["ab", "abcdefgh", "汉字说\0", "a汉😀\u{ff}"][random.below(4)];
            let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
            for _ in 0..random.below(2000) {
                let text = random_text(&mut random, alphabet, 12).into_bytes();
                let token = text[random.below(text.len() + 1)..].to_vec();
                if !token.is_empty() && !tokens.contains(&token) {
                    tokens.push(token);
                }
            }
            let slices: Vec<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
            let (trie, shorter) = Trie::new(&slices);
            for (token, &found) in tokens.iter().zip(&shorter) {
                let longest = trie.longest(&token[..token.len() - 1], 0).0;
                assert_eq!(found, longest, "seed {seed}");
            }
            let text = random_text(&mut random, alphabet, 200).into_bytes();
            for start in 0..text.len() {
                let fits = |id: &usize| text[start..].starts_with(&tokens[*id]);
                let longest = (0..tokens.len()).filter(fits).max_by_key(|&id| tokens[id].len());
                let longest = longest.unwrap();
                let expected = (longest as u32, start + tokens[longest].len());
                assert_eq!(trie.longest(&text, start), expected, "seed {seed}");
            }
        }
    }

    #[test]
    fn nodes_share_blocks() {
        let tokens: Vec<Vec<u8>> = (0..20_000u32).map(|number| number.to_be_bytes()[1..].to_vec()).collect();
        let (trie, _) = Trie::new(&tokens.iter().map(Vec::as_slice).collect::<Vec<_>>());
        assert!(trie.nodes.len() < 22_000, "{} nodes", trie.nodes.len());
        assert_eq!(trie.longest(&[0, 78, 31, 9], 0), (19_999, 3));
        assert_eq!(trie.longest(&[0, 78, 32, 9], 0), (NONE, 0));
    }
}
