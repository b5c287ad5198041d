/* Sphinx's search, with pages above the attributes and methods of the reference, and pages that teach
   above those that list. */
var Scorer = {
  score: ([page, , , description, score, , kind]) => {
    if (/^(architecture|changelog|compatibility|programs)$/.test(page)) score -= 8;
    if (kind === "title") return score + 20;
    const member = kind === "object" && /attribute|method|property/.test(description);
    return member ? score - 40 : score;
  },
  objNameMatch: 30,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
