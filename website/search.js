// In the search a word that begins with "-" excludes pages. A flag such as --compress is meant as a word to find.
document.addEventListener("input", ({target}) => {
  if (target.matches("[data-md-component=search-query]")) {
    const plain = target.value.replace(/(^|\s)-+/g, "$1");
    if (plain !== target.value) target.value = plain;
  }
}, true);
