// Lets lines of Chinese break between words only. Browsers break them between any two characters, as in 运|行.

const segmenter = "Segmenter" in Intl ? new Intl.Segmenter("zh", { granularity: "word" }) : null;
const HAN = /\p{Script=Han}/u;
const CLINGS = /^[的地得了着过吗呢吧啊呀们里上下中内外后前时个条次步秒分点张位年月日号岁种]$/; // to the word before
const LEADS = /^[和与或在把被从用对向跟给让比为是很太最更再不没未第请每各这那哪几它就都也还又才只若要会能可]$/; // to the word after
const TERMS = /(词元|服务器|浏览器|微调|续写|小模型|强化学习|标签页|上下文)/; // words that browsers do not know

// style.css forbids breaks inside Chinese text only where this browser can say where the words end.
document.documentElement.classList.toggle("phrases", segmenter !== null);

/** Return the words of a text, which joined form the text. A line may break between any two of them. */
export function phrases(text) {
  if (segmenter === null || !HAN.test(text)) return [text];
  const found = [];
  let [before, open] = ["", false]; // the last segment, and whether it is a word
  for (const { segment, isWordLike } of text.split(TERMS).flatMap(segments)) {
    const meet = open && isWordLike && (HAN.test(before.slice(-1)) || HAN.test(segment[0]));
    if (meet && !CLINGS.test(segment) && !LEADS.test(before)) found.push(segment);
    else found.push((found.pop() ?? "") + segment);
    [before, open] = [segment, isWordLike];
  }
  return found;
}

function segments(text) {
  return TERMS.test(text) ? [{ segment: text, isWordLike: true }] : [...segmenter.segment(text)];
}

/** Return a text as nodes, with a <wbr> wherever a line may break but the browser would not find the place itself. */
export function phrased(text) {
  return phrases(text).flatMap((phrase, index) => (index ? [document.createElement("wbr"), phrase] : [phrase]));
}
