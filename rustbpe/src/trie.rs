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
/// How many of the newest blocks are searched for room for a node's children. Older blocks are nearly full.
const OPEN_BLOCKS: u32 = 8;

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

impl Trie {
    /// Build the trie. `tokens[i]` are the bytes of token i, which must not be empty.
    pub fn new<'t>(tokens: impl Iterator<Item = &'t [u8]>) -> Self {
        let mut sorted: Vec<(&[u8], u32)> = tokens.zip(0..).collect();
        sorted.sort_unstable();
        let mut room = Room { nodes: Vec::new(), free: Vec::new() };
        let mut tokens = Vec::new();
        room.add_block();
        room.take(ROOT, NOT_FREE);
        // Nodes whose children are not placed yet: the node, its depth, and the range of tokens below it.
        let mut waiting = vec![(ROOT, 0, 0..sorted.len())];
        while let Some((node, depth, range)) = waiting.pop() {
            let mut children: Vec<(u8, std::ops::Range<usize>)> = Vec::new();
            let mut ending = None;
            for index in range {
                let (token, id) = sorted[index];
                match (token.get(depth), children.last_mut()) {
                    (None, _) => {
                        ending = Some(id);
                    }
                    (Some(&byte), Some((last, range))) if *last == byte => range.end = index + 1,
                    (Some(&byte), _) => children.push((byte, index..index + 1)),
                }
            }
            if children.is_empty() {
                room.nodes[node as usize].base = TOKEN | LEAF | ending.unwrap_or_default();
                continue;
            }
            let base = room.base_for(&children.iter().map(|(byte, _)| *byte).collect::<Vec<_>>());
            room.nodes[node as usize].base = base;
            if let Some(id) = ending {
                room.nodes[node as usize].base |= TOKEN;
                if tokens.len() < room.nodes.len() {
                    tokens.resize(room.nodes.len(), NONE);
                }
                tokens[node as usize] = id;
            }
            for (byte, range) in children {
                let child = base ^ u32::from(byte);
                room.take(child, node);
                waiting.push((child, depth + 1, range));
            }
        }
        Self { nodes: room.nodes, tokens }
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
        for word in end.saturating_sub(OPEN_BLOCKS * BLOCK) / 64..end / 64 {
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
            let trie = Trie::new(tokens.iter().map(Vec::as_slice));
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
        let trie = Trie::new(tokens.iter().map(Vec::as_slice));
        assert!(trie.nodes.len() < 22_000, "{} nodes", trie.nodes.len());
        assert_eq!(trie.longest(&[0, 78, 31, 9], 0), (19_999, 3));
        assert_eq!(trie.longest(&[0, 78, 32, 9], 0), (NONE, 0));
    }
}
