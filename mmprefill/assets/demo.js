() => {
  // What gradio leaves to be said: names, who speaks in the conversation, and one word when an answer begins and ends.
  const box = document.querySelector('#box'), chat = document.querySelector('#chat');
  box.querySelector('textarea').setAttribute('aria-label', 'Your question');
  document.querySelectorAll('#examples img').forEach(picture => { picture.alt = ''; });

  // Read token by token an answer is a stutter: the log is not live, and this line says it once it is whole.
  const said = document.body.appendChild(document.createElement('p'));
  said.id = 'said';
  said.setAttribute('role', 'status');
  let busy = false;
  const answer = () => [...chat.querySelectorAll('[data-testid=bot]')].at(-1)?.innerText.trim() ?? '';
  const watch = () => {
    chat.querySelector('[role=log]')?.setAttribute('aria-live', 'off');
    chat.querySelectorAll('.image-container').forEach((each, i) => {
      const picture = each.querySelector('img'), around = picture?.closest('button');
      const name = `Picture ${i + 1} of this conversation`;
      if (picture && !picture.alt) picture.alt = name;
      if (around && !around.ariaLabel) around.ariaLabel = name;
    });
    const now = !box.querySelector('[data-testid=submit-button]');
    if (now === busy) return;
    busy = now;
    if (busy) said.textContent = 'Answering.';
    else setTimeout(() => { said.textContent = answer(); }, 100);  // the last words may be drawn behind the button
  };
  for (const each of [chat, box]) new MutationObserver(watch).observe(each, {childList: true, subtree: true});
  watch();
}
