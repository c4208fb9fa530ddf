() => {
  // Text of the page whose contrast with what lies behind it is below 4.5 (WCAG 2, AA), placeholders and values among it.
  const parse = colour => {
    const parts = (colour.match(/[\d.]+/g) ?? []).map(Number);
    return parts.length < 3 ? [0, 0, 0, 0] : [...parts.slice(0, 3), parts[3] ?? 1];
  };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3]));
  const behind = element => {
    const layers = [];
    for (let each = element; each && layers.at(-1)?.[3] !== 1; each = each.parentElement)
      layers.push(parse(getComputedStyle(each).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const light = colour => colour.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (colour, under) => {
    const [dark, bright] = [light(over(parse(colour), under)), light(under)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  const words = each => [
    ...[...each.childNodes].filter(node => node.nodeType === 3 && node.data.trim()).map(node => [node.data, null]),
    ...(each.placeholder && !each.value ? [[each.placeholder, '::placeholder']] : []),
    ...(each.tagName === 'INPUT' && each.value ? [[each.value, null]] : []),
  ];
  return [...document.querySelectorAll('body *')]
    .filter(each => each.checkVisibility({visibilityProperty: true, opacityProperty: true}))
    .flatMap(each => words(each).map(([text, part]) => [text.trim(), contrast(getComputedStyle(each, part).color, behind(each))]))
    .filter(([, ratio]) => ratio < 4.5);
}
